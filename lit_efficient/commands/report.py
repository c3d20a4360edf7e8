"""``python -m lit_efficient report RUN [RUN ...]``: write a page of HTML about runs, with pictures.

``--serve`` shows the page at an address of this machine instead, made anew for each request, until Ctrl-C.
"""

import argparse
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.events import EVENTS
from lit_efficient.files.runs import LATEST, read_record, real

if TYPE_CHECKING:
    from lit_efficient.evidence.reporting.run_record import RunRecord

_REFRESH_S = 5
_SIGNS = (EVENTS, "config.yaml", "metrics.csv", "lightning_logs")


def run(argv: Sequence[str]) -> int:
    """Run ``report`` and return its exit code."""
    parser = argparse.ArgumentParser(
        "lit_efficient report",
        description="Write a page of HTML about a run: curves, samples, techniques, config, environment. Several runs "
        "are shown side by side, with the differences of their configs.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, a checkpoint in it, or `latest`")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="default: report.html in the folder of a single run, else here",
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page to this machine, refreshed while a run goes on"
    )
    parser.add_argument("--port", type=int, default=0, help="port of --serve (default: any free port)")
    options = parser.parse_args(argv)
    if options.serve and options.output:
        raise ConfigurationError("report: --serve writes no file: leave --output out")
    if not 0 <= options.port <= 65535:
        raise refusal("report", "--port", "between 0 and 65535", options.port)
    folders = list(dict.fromkeys(folder_of(name) for name in options.runs))
    if options.serve:
        return _serve(folders, options.port)

    from lit_efficient.evidence.reporting.pages import plain
    from lit_efficient.evidence.reporting.run_page import facts
    from lit_efficient.evidence.reporting.run_record import RunRecord

    target = Path("report.html")
    if options.output:
        target = Path(options.output)
    elif len(folders) == 1:
        target = folders[0] / "report.html"
    if target.is_dir():
        target = target / "report.html"
    runs = [RunRecord(folder) for folder in folders]
    size = write_report(runs, target)
    for each in runs:
        print(plain(each.name))
        for name, value in facts(each).items():
            print(f"  {name:<18}{' '.join(plain(value).split())}")
    print(f"Wrote {target} ({size / 1000:,.0f} kB): open it in a browser.")
    return 0


def write_report(runs: "Sequence[RunRecord]", target: Path) -> int:
    """Write the page of some runs, and return its size in bytes.

    Raises:
        ConfigurationError: If the file exists and is no report.
    """
    from lit_efficient.evidence.reporting.run_page import MARK, page
    from lit_efficient.files.atomic_file import replacing

    if target.exists() and not target.read_bytes().startswith(MARK.encode()):
        raise ConfigurationError(f"report: {target} exists already and is no report: name another --output")
    content = page(runs).encode()
    with replacing(target) as file:
        file.write(content)
    return len(content)


def _serve(folders: Sequence[Path], port: int) -> int:
    """Serve the page of some runs on the loopback address until Ctrl-C."""
    with server(folders, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/ shows the report until Ctrl-C", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
    return 0


def server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page of some runs. The page asks a browser to load it again until all runs have ended."""
    from lit_efficient.evidence.reporting.run_page import page
    from lit_efficient.evidence.reporting.run_record import RunRecord

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may only reach this server under a name of its own.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):
                self.send_error(403, "only for this machine")
            elif self.path != "/":
                self.send_error(404)
            else:
                self._answer()

        def _answer(self) -> None:
            runs = [RunRecord(folder) for folder in folders]
            content = page(runs).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if not all(run.ended for run in runs):
                self.send_header("Refresh", str(_REFRESH_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing for each request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Pages)


def folder_of(name: str) -> Path:
    """Return the folder of a run.

    Args:
        name: The folder itself, ``latest``, the folder above it, or one of its checkpoints.

    Raises:
        ConfigurationError: If there is no such run.
    """
    path = real(Path(name))
    if not path.exists() and name == LATEST:  # of all configs
        found = [real(path) for pattern in ("*", "*/*") for path in Path("runs").glob(f"{pattern}/{LATEST}")]
        path = max(found, key=lambda folder: folder.name, default=path)
    if not path.exists():
        raise ConfigurationError(f"report: there is no run {name}")
    is_folder = path.is_dir() and path.suffix != ".ckpt"
    if is_folder:
        places = [path, real(path / LATEST)]
    else:
        places = list(path.parents)[:3]
    for place in places:
        if read_record(place) is not None or any((place / sign).exists() for sign in _SIGNS):
            return place
    signs = ", ".join(("run.json", *_SIGNS))
    raise ConfigurationError(f"report: {name} is no run's folder and is not inside one: none of {signs} was found")

"""Run the GPU checks in pieces, each of which writes its result immediately: smoke test, tests, benchmarks, ladder.

    python -m benchmarks.gpu.drive [--out runs/gpu] [--minutes 12] [--wheels FOLDER ...] [--only smoke tests ...]
    python -m benchmarks.gpu.drive --pieces 'ladder/8B QLoRA, 2k'    pieces by name
    python -m benchmarks.gpu.drive --device cpu --quick              three cases, to test the driver

Each piece runs in a separate process with a time limit, because a CUDA error makes its process unusable. The rungs of
the ladder share one process; if one of them ends it, the remaining rungs get another one. If a piece crashes, hangs or
lacks a package, this is recorded as a row, and the next piece runs. Rows are lines of ``results.jsonl`` in the folder
``--out``. ``report.md`` in the same folder is updated after each row.

A second call on the same device and version of torch runs what was skipped or interrupted, and pieces whose code has
changed. ``--again`` also runs the failed ones. A piece that would usually end after ``--minutes`` is not begun. The
last lines name what was left out, and the next call begins there. Where a command may last only ten minutes, call with
``--minutes 9`` several times. Compiled kernels are kept in ``runs/gpu_cache``.

Needs torch 2.10 or newer and Python 3.11 or newer. Other missing packages are listed. ``--wheels`` names folders of
wheels to install into a temporary folder for this call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.pieces import GROUPS, ROOT, Piece, pieces
from benchmarks.gpu.report import report

PACKAGES = (
    *("torch", "lightning", "triton", "transformers", "peft", "diffusers", "bitsandbytes", "torchao", "liger-kernel"),
    *("jsonargparse", "tensorboard", "wandb", "timm", "ema-pytorch", "datasets", "scikit-learn", "pytest"),
)
FINAL = {"ok", "failed", "crashed", "out of time"}  # a second call leaves these alone
LEAST_SECONDS = 8  # with less time left no piece is begun
# A piece dies with its driver: else what a killed call was running is measured beside the next call's pieces. A start
# of its own sets that, for code between fork and exec can hang in a process of several threads.
STARTER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
Launch = Callable[[list[str], Path, float, dict[str, str]], int | None]


def launch(words: list[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Run ``python WORDS`` in a new session. Return its exit code, or ``None`` if killed after ``limit`` seconds."""
    with log.open("wb") as output:
        start = [sys.executable, "-S", "-c", STARTER, *words]
        process = subprocess.Popen(
            start, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


@dataclass
class Driver:
    """Runs pieces and writes their rows.

    Args:
        out: Folder of rows and report.
        header: Command, versions and device.
        minutes: Time limit of this call.
        again: Whether to run failed pieces again.
        environment: Environment variables of the pieces.
        start: Function that runs the process of a piece.
    """

    out: Path
    header: dict[str, Any]
    minutes: float
    again: bool
    environment: dict[str, str]
    start: Launch = launch

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = self.out / "results.jsonl"
        self.lock = threading.Lock()
        self.deadline = time.monotonic() + 60 * self.minutes
        self.rows: dict[str, dict[str, Any]] = {}
        self.left_out: list[str] = []  # names of pieces for which this call had no time
        if self.file.exists():
            text = self.file.read_text("utf-8")
            if text and not text.endswith("\n"):  # cut off while it was written: the next row has a line of its own
                with self.file.open("a", encoding="utf-8") as file:
                    file.write("\n")
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if row.get("on") == self.on:  # the report names one device and one torch
                    self.rows[row["name"]] = row

    @property
    def on(self) -> list[str]:
        versions = self.header["versions"]
        return [self.header["device"], versions["python"], versions.get("torch", "")]

    def run(self, plan: list[Piece], jobs: int) -> None:
        """Run the unfinished pieces, up to ``jobs`` at a time in groups that allow it."""
        for group in dict.fromkeys(piece.group for piece in plan):
            todo = [piece for piece in plan if piece.group == group and not self.done(piece)]
            todo = [piece for piece in todo if not self.skips(piece, plan)]
            alone = [piece for piece in todo if not piece.shares]
            with ThreadPoolExecutor(min(jobs, GROUPS[group].at_once)) as pool:
                list(pool.map(lambda piece: self.one(piece, plan), alone))
            self.together([piece for piece in todo if piece.shares], plan)
        self.write_report(plan)

    def done(self, piece: Piece) -> bool:
        row = self.rows.get(piece.name, {})
        finished = row.get("status") == "ok" or (not self.again and row.get("status") in FINAL)
        return finished and row["command"] == piece.command and row.get("fingerprint", "") == piece.fingerprint

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def usual(self, piece: Piece) -> float:
        """Return the seconds that a piece takes: those of its last complete run, else what it declares."""
        row = self.rows.get(piece.name, {})
        measured = row.get("status") == "ok" and "seconds" in row
        return max(LEAST_SECONDS, row["seconds"] if measured else piece.usual)

    def skips(self, piece: Piece, plan: list[Piece]) -> bool:
        """Write the row of a piece that cannot run, and return whether it is one."""
        missing = [name for name in piece.needs if not self.has(name)]
        if piece.skip or missing:
            self.note(piece, plan, status="skipped", why=piece.skip or f"needs {', '.join(missing)}")
        return bool(piece.skip or missing)

    def leave_out(self, piece: Piece, plan: list[Piece]) -> None:
        """Note that there is no time for a piece. A row of an earlier call stays."""
        self.left_out.append(piece.name)
        if piece.name not in self.rows:
            why = f"it usually takes {self.usual(piece):.0f} s, more than was left of {self.minutes:g} minutes"
            self.note(piece, plan, status="not reached", why=why)

    def one(self, piece: Piece, plan: list[Piece]) -> None:
        """Run one piece and write its row."""
        left = self.left()
        if left < self.usual(piece):
            self.leave_out(piece, plan)
            return
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            begin = time.monotonic()
            code = self.start(piece.words, log, min(piece.limit, left), {**self.environment, "TMPDIR": folder})
            seconds = round(time.monotonic() - begin, 1)
            text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        status = {0: "ok", None: "out of time" if left > piece.limit else "cut off"}.get(code, "failed")
        if code is not None and code < 0:
            status = "crashed"
        self.note(piece, plan, status=status, code=code, seconds=seconds, **read(text, piece.keep, status))

    def together(self, pieces: list[Piece], plan: list[Piece]) -> None:
        """Run pieces one after the other in one process, and write the row of each as soon as it has ended."""
        todo = list(pieces)
        while todo and self.left() >= self.usual(todo[0]):
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
                log = Path(folder) / "log"
                words = [*todo[0].words[:-1], *(piece.words[-1] for piece in todo)]
                words += ["--seconds", f"{self.left():.0f}", "--limit", f"{todo[0].limit:g}"]
                process = pool.submit(self.start, words, log, self.left(), {**self.environment, "TMPDIR": folder})
                place = 0
                begin = time.monotonic()
                while todo:
                    ended = process.done()  # asked before the log is read, so that its last lines are not missed
                    text = log.read_bytes()[place:].decode("utf-8", errors="replace") if log.exists() else ""
                    lines, found = until_done(text, todo[0].words[-1])
                    if found is not None:
                        seconds = round(time.monotonic() - begin, 1)
                        kept = read(lines, todo[0].keep, "ok")["output"]
                        self.note(todo.pop(0), plan, status="ok", seconds=seconds, result=found, output=kept)
                        place += len(lines.encode())
                        begin = time.monotonic()
                    elif ended:
                        break
                    else:
                        time.sleep(0.1)
                code = process.result()
            if not todo or code == 0:  # its own clock has stopped
                break
            status = "failed"
            if code is None:
                status = "cut off"
            elif code < 0:
                status = "crashed"
            elif "Timeout (" in text:  # the words of faulthandler
                status = "out of time"
            seconds = round(time.monotonic() - begin, 1)
            self.note(todo.pop(0), plan, status=status, code=code, seconds=seconds, **read(text, 3000, status))
        for piece in todo:
            self.leave_out(piece, plan)

    def has(self, package: str) -> bool:
        path = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        return find_spec(package) is not None or any((Path(p) / package).is_dir() for p in path if p)

    def note(self, piece: Piece, plan: list[Piece], **found: Any) -> None:
        row = {"name": piece.name, "group": piece.group, "command": piece.command, "on": self.on, **found}
        row["fingerprint"] = piece.fingerprint
        with self.lock:
            self.rows[piece.name] = row
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(f"{row['status']:12} {row.get('seconds', 0):6} s  {piece.name}  {row.get('why', '')}", flush=True)
            self.write_report(plan)

    def write_report(self, plan: list[Piece]) -> None:
        (self.out / "report.md").write_text(report(self.header, plan, self.rows), "utf-8")


def read(text: str, keep: int, status: str) -> dict[str, Any]:
    """Return the ``RESULT`` lines that a piece printed as one dictionary, and the end of its other output."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("RESULT "):
            try:
                result |= json.loads(line.removeprefix("RESULT "))
            except json.JSONDecodeError:
                continue
    others = [line for line in text.splitlines() if not line.startswith("RESULT ")]
    kept = keep if status == "ok" else max(keep, 3000)
    end = ""
    if kept:  # A slice [-0:] would be the whole text.
        end = "\n".join(others)[-kept:]
    return {"result": result, "output": end}


def until_done(text: str, name: str) -> tuple[str, dict[str, Any] | None]:
    """Return the lines up to the one with which a piece of a shared process ends, and its figures if there are any."""
    taken = ""
    for line in text.splitlines(keepends=True):
        taken += line
        if line.startswith("RESULT ") and line.endswith("\n"):
            figures = json.loads(line.removeprefix("RESULT "))
            if figures.pop("rung") == name and figures.pop("done"):
                return taken, figures
    return taken, None


def installed(folders: list[Path]) -> tuple[str, list[str]]:
    """Install the wheels into a temporary folder. Return it, and the wheels that could not be installed."""
    target = tempfile.mkdtemp(prefix="gpu_wheels_")
    refused = []
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target"]
    install = [sys.executable, "-m", "pip", "install", *options, target]
    wheels = sorted(wheel for folder in folders for wheel in folder.glob("*.whl"))
    if subprocess.run([*install, *map(str, wheels)], check=False, stdout=subprocess.DEVNULL).returncode:
        for wheel in wheels:  # which of them?
            if subprocess.run([*install, str(wheel)], check=False, stdout=subprocess.DEVNULL).returncode:
                refused.append(wheel.name)
    return target, refused


def header(device: str, path: str, refused: list[str]) -> dict[str, Any]:
    """Return command, versions and device, without initialising CUDA in this process."""
    sys.path[:0] = [path] if path else []
    found = {"python": platform.python_version()}
    missing = []
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if device == "cuda":
        words = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            machine = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            machine = f"a CUDA device that nvidia-smi does not name ({type(error).__name__})"
    command = " ".join(["python", "-m", "benchmarks.gpu.drive", *sys.argv[1:]])
    return {"command": command, "device": machine, "versions": found, "missing": missing, "refused": refused}


def main(arguments: list[str] | None = None, start: Launch = launch) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="three cases of the smoke test")
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--pieces", nargs="+", metavar="NAME", help="only these, as report.md names them")
    parser.add_argument("--wheels", nargs="+", type=Path, default=[], metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=4, help="pieces at a time, where a group allows it")
    parser.add_argument("--again", action="store_true", help="run again what has failed")
    options = parser.parse_args(arguments)
    for folder in options.wheels:
        if not any(folder.glob("*.whl")):
            parser.error(f"--wheels: there is no wheel in {folder}")
    path, refused = installed(options.wheels) if options.wheels else ("", [])
    places = [path, str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "2" if options.jobs > 1 else "4"}
    cache = ROOT / "runs" / "gpu_cache"
    environment["LIT_EFFICIENT_CACHE"] = str(cache)
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    driver = Driver(
        options.out,
        header(options.device, path, refused),
        options.minutes,
        options.again,
        environment,
        start,
    )
    plan = [piece for piece in pieces(options.device, quick=options.quick) if piece.group in options.only]
    if options.pieces:
        names = [piece.name for piece in plan]
        unknown = [name for name in options.pieces if name not in names]
        if unknown:
            near = [name for name in names if unknown[0].rpartition("/")[2] in name]
            parser.error(f"--pieces: there is no piece {unknown[0]!r}; near it: {', '.join(near[:5]) or 'none'}")
        plan = [piece for piece in plan if piece.name in options.pieces]
    driver.run(plan, options.jobs)
    if driver.left_out:
        print(f"\nLeft out for lack of time, {len(driver.left_out)}: {', '.join(driver.left_out)}")
        print("Call again to run them.")
    print(f"\n{options.out / 'report.md'}")
    return int(any(driver.rows[piece.name]["status"] in FINAL - {"ok"} for piece in plan if piece.name in driver.rows))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, and the piece under way with it
    sys.exit(main())

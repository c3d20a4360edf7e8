"""``python -m lit_efficient tune -c X --device-memory 24GiB``: search for the fastest way to run a fit in some memory.

The effective batch stays the same. Plans exclude candidates that do not fit, and few candidates run. The best one is
written as an overlay. A folder next to it holds a table of all candidates and the state of an interrupted search.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.errors import OutOfMemoryError, check_number, refusal


def run(argv: Sequence[str]) -> int:
    """Run ``tune`` and return its exit code."""
    parser = argparse.ArgumentParser(
        "lit_efficient tune",
        description="Search for the batch size, the accumulation, and the techniques for memory and speed with the "
        "most samples a second that fit, at the same effective batch. Candidates are planned first, and most never "
        "run. The best is written as an overlay. Takes the options of fit: -c CONFIG, --trainer.precision bf16-mixed, "
        "...",
        epilog="exit codes: 0 found, 3 nothing fits, 2 user error, 130 interrupted: results are kept, and the same "
        "command continues",
        allow_abbrev=False,
    )
    parser.add_argument("--device_memory", metavar="24GiB", help="memory of a step (default: the free memory)")
    parser.add_argument("--minutes", type=float, default=20.0, help="time after which no new run begins (default: 20)")
    parser.add_argument(
        "--allow_changes",
        nargs="*",
        metavar="NAME",
        help="also try these options, which change the results; without names, lower precision and other batches",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="options to try, such as batch_size (default: all)")
    parser.add_argument(
        "--batch",
        default="auto",
        metavar="data.batch_size",
        help="setting of the batch size",
    )
    parser.add_argument("--output", metavar="FILE.yaml", help="path of the overlay (default: runs/tune/CONFIG.yaml)")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options, rest = parser.parse_known_args(argv)
    check_number("tune", "--minutes", options.minutes, above=0)
    output = Path(options.output or Path("runs", "tune", f"{_name(rest)}.yaml"))
    if output.suffix not in (".yaml", ".yml"):
        raise refusal("tune", "--output", "a file that ends in .yaml", options.output)
    from lit_efficient.cli import explained

    with explained(rest), tempfile.TemporaryDirectory(prefix="tune-") as root:
        return _tuned(options, rest, output, root, shlex.join(["tune", *argv]))


def _tuned(options: argparse.Namespace, argv: list[str], output: Path, root: str, command: str) -> int:
    from lit_efficient.cli.fits import ConfigFit
    from lit_efficient.cli.next_steps import COMMAND
    from lit_efficient.evidence.tuning.tuned import tune
    from lit_efficient.files.atomic_file import replacing

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    # The option without names allows all changes, and without the option none is allowed.
    allowed = options.allow_changes or options.allow_changes is not None
    folder = output.with_suffix("")
    config = json.dumps(ConfigFit(argv, root).config(), sort_keys=True, default=str)
    try:
        found = tune(
            ConfigFit(argv, root),
            options.device_memory,
            allow_changes=allowed,
            only=options.only,
            batch=options.batch,
            minutes=options.minutes,
            folder=folder,
            key=hashlib.sha256(config.encode()).hexdigest()[:16],
            sketch=ConfigFit(argv, root, "meta"),
            say=say,
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted: the results are in {folder}, and the same command continues", file=sys.stderr)
        return 130
    print("\n".join([*found.lines(), f"all candidates: {folder / 'table.csv'}"]))
    if found.best is None:
        return OutOfMemoryError.exit_code
    use = f"{COMMAND} fit {shlex.join(argv)} -c {shlex.quote(str(output))}"
    with replacing(output) as file:
        file.write(found.overlay(f"{COMMAND} {command}", use).encode())
    print(f"Wrote {output}\nNext:\n  {use}\n  {use.replace(' fit ', ' verify ', 1)}")
    return 0


def _name(argv: Sequence[str]) -> str:
    """Return a name for the configs of a command line."""
    words = re.split(r"\s-(?:c|-config)[ =]", " " + " ".join(argv))[1:]
    return "+".join(Path(word.split()[0]).stem for word in words if word.split()) or "fit"

"""``python -m lit_efficient verify -c X``: check properties that a training should have.

The checks are short fits in a temporary folder. Files of runs are neither read nor written.
"""

import argparse
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_efficient.evidence.verifying.claims import Verdict


def run(argv: Sequence[str]) -> int:
    """Run ``verify`` and return its exit code."""
    parser = argparse.ArgumentParser(
        "lit_efficient verify",
        description="Check accumulation, resuming, masks, exports and other properties of a training with the config's "
        "own classes, data and settings. Prints a line for each claim with its number and tolerance, and for a failure "
        "the first layer that differs. Takes the options of fit: -c CONFIG, --trainer.precision bf16-mixed, ...",
        epilog="exit codes: 0 no claim failed; 2 a claim failed, or the config is wrong; 130 interrupted, after the "
        "known verdicts are printed",
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="A,B", default="", help="check these claims only; `--only help` lists all")
    parser.add_argument("--full", action="store_true", help="do not shorten a model of more than 50 million parameters")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options, rest = parser.parse_known_args(argv)
    from lit_efficient.cli import explained
    from lit_efficient.cli.fits import ConfigFit
    from lit_efficient.evidence.verifying.verification import CLAIMS, chosen, lines_of, verify

    if options.only == "help":
        width = max(len(claim.name) for claim in CLAIMS)
        _print(f"{claim.name:{width}}  {claim.sentence}" for claim in CLAIMS)
        return 0
    only = [name.strip() for name in options.only.split(",") if name.strip()]

    def tell(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    def seen(verdict: "Verdict") -> None:
        if not options.json:
            _print(lines_of(verdict))

    chosen(only)  # refuses a wrong name before anything is built
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, explained(rest):
        report = verify(
            ConfigFit(rest, folder),
            only=only,
            full=options.full,
            tell=tell,
            seen=seen,
        )
    if options.json:
        print(report.json())
    else:
        _print(report.summary())
    return report.exit_code


def _print(lines: Iterable[str]) -> None:
    """Print lines, wrapped to the width of a terminal."""
    columns = 10**6
    if sys.stdout.isatty():
        columns = max(40, shutil.get_terminal_size().columns)
    for line in lines:
        print(textwrap.fill(line, columns, subsequent_indent=" " * 6, break_on_hyphens=False), flush=True)

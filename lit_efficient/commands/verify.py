"""``python -m lit_efficient verify -c X``: whether what ought to be true of this training is true of it.

Short fits on copies, in a temporary folder: nothing of a run's is read or written.
"""

import argparse
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence


def run(argv: Sequence[str]) -> int:
    """Answer ``verify``."""
    parser = argparse.ArgumentParser(
        "lit_efficient verify",
        description="Check on the config's own classes, data and settings that accumulation, resuming, masks, exports "
        "and the rest do what they claim: a line a claim, with its number and tolerance, and of a failure the first "
        "layer that differs. Takes the options of fit: -c CONFIG, --trainer.precision bf16-mixed, ...",
        epilog="exit codes: 0 no claim failed; 2 one did, or the config is wrong; 130 interrupted, with the verdicts "
        "that were there",
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="A,B", default="", help="check these claims; `--only help` lists them")
    parser.add_argument("--full", action="store_true", help="take a model above 50 million parameters as it is")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    options, rest = parser.parse_known_args(argv)
    from lit_efficient.cli.errors import explained
    from lit_efficient.cli.fits import ConfigFit
    from lit_efficient.evidence.verification import CLAIMS, chosen, lines_of, verify

    if options.only == "help":
        width = max(len(claim.name) for claim in CLAIMS)
        _print(f"{claim.name:{width}}  {claim.sentence}" for claim in CLAIMS)
        return 0
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    chosen(only)  # a wrong name is said before anything is built
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, explained(["fit", *rest]):
        report = verify(
            ConfigFit(rest, folder),
            only=only,
            full=options.full,
            tell=None if options.quiet else lambda line: print(line, file=sys.stderr, flush=True),
            seen=None if options.json else lambda verdict: _print(lines_of(verdict)),
        )
    if options.json:
        print(report.json())
    else:
        _print(report.summary())
    return report.exit_code


def _print(lines: Iterable[str]) -> None:
    """Print lines, in a terminal in its width."""
    columns = max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 10**6
    for line in lines:
        print(textwrap.fill(line, columns, subsequent_indent=" " * 6, break_on_hyphens=False), flush=True)

"""``python -m lit_efficient verify -c X``: whether what ought to be true of this training is true of it.

Short fits on copies, in a temporary folder: nothing of a run's is read or written.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Answer ``verify``."""
    parser = argparse.ArgumentParser(
        "lit_efficient verify",
        description="Check on the config's own classes, data and settings that accumulation, resuming, averages, "
        "exports and the rest do what they claim: a line a claim, with its number and tolerance, and of a failure the "
        "first layer that differs. Takes the options of fit: -c CONFIG, --trainer.precision bf16-mixed, ...",
        epilog="exit codes: 0 no claim failed, 2 one did, or the config is wrong; 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="A,B", default="", help="check these claims; `--only help` lists them")
    parser.add_argument("--full", action="store_true", help="take a model above 50 million parameters as it is")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    options, rest = parser.parse_known_args(argv)
    from lit_efficient.cli.errors import explained
    from lit_efficient.cli.fits import ConfigFit
    from lit_efficient.evidence.verification import CLAIMS, verify

    width = max(len(claim.name) for claim in CLAIMS)
    if options.only == "help":
        print("\n".join(f"{claim.name:{width}}  {claim.sentence}" for claim in CLAIMS))
        return 0

    with tempfile.TemporaryDirectory(prefix="verify-") as folder, explained(["fit", *rest]):
        report = verify(
            ConfigFit(rest, folder),
            only=[name.strip() for name in options.only.split(",") if name.strip()],
            full=options.full,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(report.json() if options.json else report.text())
    return report.exit_code

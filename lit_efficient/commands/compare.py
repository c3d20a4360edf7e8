"""``python -m lit_efficient compare -c X --with lora --with ema``: measure the effect of techniques on a config.

The config is trained unchanged, with each overlay alone, with all, and with all but one, alternately and each in a
separate process. The comparison is written as a table, Markdown, CSV and a page of HTML. Runs are kept: the same
command continues where it stopped, and more ``--with`` or ``--minutes`` add runs.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files import configs

_NAMED = 8  # variants whose names are printed


def run(argv: Sequence[str]) -> int:
    """Run ``compare`` and return its exit code."""
    options, rest = _parser().parse_known_args(argv)
    if not options.overlays and not options.all:
        raise refusal("compare", "--with", "at least one overlay, unless --all is given", options.overlays)
    for given in [*options.overlays, *filter(None, [options.forgetting])]:
        if "=" not in given:
            configs.find(given)
    import yaml

    from lit_efficient.cli.fits import ConfigFit
    from lit_efficient.cli.next_steps import COMMAND
    from lit_efficient.cli.secrets import redacted
    from lit_efficient.evidence.comparing.comparison_page import log_to_wandb, write_report
    from lit_efficient.evidence.comparing.comparison_runs import Comparing, Schedule
    from lit_efficient.evidence.comparing.comparison_tables import terminal_table
    from lit_efficient.evidence.fits import Change

    names = list(options.overlays)
    if options.all:
        names += [path.stem for path in sorted((configs.folder() / "techniques").glob("*.yaml"))]
    changes = []
    for name in dict.fromkeys(names):
        key, _, value = name.partition("=")
        if value:
            changes.append(Change(name, settings={key: yaml.safe_load(value)}))
            continue
        changes.append(Change(name, overlays=(name,)))
        if name.endswith(".yaml"):
            changes[-1] = Change(Path(name).stem, overlays=(name,))
    forgetting = None
    if options.forgetting:
        forgetting = partial(_data, [*rest, "-c", options.forgetting])
    root = options.folder or Path("runs", "compare")
    comparing = Comparing(
        ConfigFit(rest, root),
        changes,
        Schedule(
            options.steps,
            options.seeds,
            options.minutes,
            options.validations,
            options.narrow / 100 or None,
            options.cpu_time,
        ),
        options.folder,
        forgetting,
        lambda line: print(line, file=sys.stderr, flush=True),
        alone=options.all,
        planner=ConfigFit(rest, root, device="meta"),
    )
    count = len(comparing.variants)
    variants = f"{count} variants"
    if count <= _NAMED:
        variants += f" ({', '.join(comparing.variants)})"
    print(
        f"compare: trains {variants} for {comparing.schedule.length} steps, {options.seeds} times each, in "
        f"{comparing.folder}. No run begins after {options.minutes:g} minutes; Ctrl-C keeps finished runs.",
        file=sys.stderr,
        flush=True,
    )
    interrupted = False
    try:
        comparing.run()
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: finished runs are kept, and the same command continues", file=sys.stderr)
    found = comparing.result(options.metric, shlex.join([*COMMAND.split(), "compare", *redacted(list(argv))]))
    if comparing.refused:
        raise ConfigurationError(found.variants[0].failed)
    files = write_report(found, comparing.folder)
    print(terminal_table(found, shutil.get_terminal_size().columns))
    print("\n".join(["", *(f"Wrote {file}" for file in files)]))
    if "wandb" in comparing.source.identity().lower():
        log_to_wandb(found, files, ConfigFit(rest, comparing.folder, device="meta").make().trainer.loggers)
    if interrupted:
        return 130
    if all(one.failed for one in found.variants):
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lit_efficient compare",
        description="Measure the effect of each technique on your config: time, memory, checkpoints, loss. "
        "Takes the options of fit: -c CONFIG, --data.batch_size 8, --trainer.limit_val_batches 20, "
        "--allow-import PACKAGE, ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--with",
        dest="overlays",
        metavar="OVERLAY",
        nargs="+",
        action="extend",
        default=[],
        help="overlays to compare, or settings: LoRA.variant=pissa. Several values of one setting are not combined",
    )
    parser.add_argument("--all", action="store_true", help="compare each technique alone that this config accepts")
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of each training, at least 3 (default: 100)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each variant (default: 3)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time after which no new run begins (default: 10)")
    parser.add_argument("--validations", type=int, default=10, help="validations in each training (default: 10)")
    parser.add_argument(
        "--narrow",
        type=float,
        default=5.0,
        help="width in %% of the intervals of times at which runs end (default: 5; 0 adds no runs for times only)",
    )
    parser.add_argument("--metric", help="metric to compare, lower is better (default: the validation loss)")
    parser.add_argument(
        "--forgetting", metavar="CONFIG", help="overlay with other `data`, whose loss is measured before and after"
    )
    parser.add_argument("--cpu_time", action="store_true", help="compare CPU time, for a CPU that other programs use")
    parser.add_argument("--folder", type=Path, help="folder of runs and report (default: one below runs/compare)")
    return parser


def _data(argv: Sequence[str]) -> object:
    from lit_efficient.cli import explained
    from lit_efficient.commands.preview import build_data

    with explained(argv):
        return build_data(argv, "compare --forgetting")

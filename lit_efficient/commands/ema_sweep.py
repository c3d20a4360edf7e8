"""``python -m lit_efficient ema-sweep DIR --sigma_rel 0.05 0.10 0.15``: build averages of any width after the run.

With ``--config`` (the one that the run saved) and ``--checkpoint`` each of them is validated, and so are the weights
without an average: a table, ``ema-sweep.csv`` and ``ema-sweep.png`` show the loss against the width.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import read, weights_alone, write
from lit_efficient.mechanisms.averages.snapshots import find_snapshots, synthesize

if TYPE_CHECKING:  # they import Lightning and matplotlib, which take seconds
    from lit_efficient.cli.evaluate import Validator
    from lit_efficient.commands.ema_curve import WidthCurve


def run(argv: list[str]) -> int:
    """Answer ``ema-sweep``. Errors are raised: the caller prints them.

    Args:
        argv: The arguments after the subcommand's name.
    """
    parser = argparse.ArgumentParser(
        "python -m lit_efficient ema-sweep",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="With --config, other options are those of `python -m lit_efficient validate`: --data.batch_size 8, "
        "--trainer.limit_val_batches 20, --allow-import PACKAGE.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of snapshots that PowerEMA wrote")
    parser.add_argument("--sigma_rel", type=float, nargs="+", required=True, help="widths to build, as shares of a run")
    parser.add_argument("--step", type=int, help="where the averages end; the last snapshot's step if left out")
    parser.add_argument("--checkpoint", help="a checkpoint of the run: its other weights complete what is written")
    parser.add_argument("--output", help="the folder to write to; that of the snapshots if left out")
    parser.add_argument("-c", "--config", action="append", help="config of the run: validate each width and plot it")
    parser.add_argument("--metric", help="what to plot, lower is better; the validation loss if left out")
    options, others = parser.parse_known_args(argv)
    if others and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(others)} (options of a validation need --config)")
    if options.config and not options.checkpoint:
        raise ConfigurationError(
            "ema-sweep: --config needs --checkpoint, a full checkpoint of the run, for what is not averaged"
        )
    snapshots = find_snapshots(options.folder)
    output = Path(options.output or options.folder)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        # First of all, because it takes a second to find out what is wrong with a config.
        validate = _validator(options.config, others, scratch) if options.config else None
        base = read(options.checkpoint) if options.checkpoint else None
        files = _build(options, base, output)
        if validate is not None and base is not None:
            step = options.step or snapshots[-1].step
            if base.get("global_step", step) != step:
                print(f"Note: {options.checkpoint} is of step {base['global_step']}, the averages end at step {step}.")
            # Without the states of callbacks: those of an EMA would put its average in place of these weights.
            write(raw := Path(scratch, "raw.ckpt"), weights_alone(base, base["state_dict"], "raw"))
            curve = _validated(validate, files, raw, step, options.metric)
            curve.write_csv(output / "ema-sweep.csv")
            curve.draw(output / "ema-sweep.png", {snapshot.sigma_rel for snapshot in snapshots})
            print(f"{curve.table()}\nWrote {output / 'ema-sweep.csv'} and {output / 'ema-sweep.png'}")
    return 0


def _build(options: argparse.Namespace, base: dict[str, Any] | None, output: Path) -> dict[float, Path]:
    """Write one file a width."""
    suffix = ".safetensors" if base is None else ".ckpt"
    files: dict[float, Path] = {}
    for sigma_rel, average in zip(options.sigma_rel, synthesize(options.folder, options.sigma_rel, options.step)):
        files[sigma_rel] = path = output / f"ema-sigma_rel={sigma_rel:g}{suffix}"
        write(path, {"state_dict": average} if base is None else _completed(base, average, options.checkpoint))
        print(f"Wrote {path}")
    return files


def _validator(configs: list[str], arguments: list[str], scratch: str) -> Validator:
    from lit_efficient.cli.evaluate import Validator

    return Validator(configs, [f"--trainer.default_root_dir={scratch}", *arguments])


def _validated(validate: Validator, files: dict[float, Path], raw: Path, step: int, metric: str | None) -> WidthCurve:
    """Validate the weights without an average, and each width."""
    from lit_efficient.commands.ema_curve import WidthCurve, loss_among

    without = validate(raw)
    metric = metric or loss_among(list(without))
    return WidthCurve({width: validate(path) for width, path in files.items()}, without, metric, step)


def _completed(base: dict[str, Any], average: dict[str, Tensor], path: str) -> dict[str, Any]:
    """The checkpoint ``base`` with the averaged weights in place of its own, tied ones too."""
    state = base["state_dict"]
    aside = base.get("lit_efficient", {}).get("training_only", ())  # heads that no weights of the network are
    average = {name: tensor for name, tensor in average.items() if name not in aside}
    if unknown := sorted(average.keys() - state.keys()):
        raise ConfigurationError(f"{path} has no {unknown[0]!r}, which the snapshots hold: is it of the same run?")
    alias = {tensor.data_ptr(): name for name, tensor in state.items() if name in average}
    completed = dict(state)
    for name, tensor in state.items():
        source = name if name in average else alias.get(tensor.data_ptr() if isinstance(tensor, Tensor) else None)
        if source is not None:
            completed[name] = average[source].to(tensor.dtype)
    return weights_alone(base, completed, "ema")

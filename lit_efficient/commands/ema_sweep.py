"""``python -m lit_efficient ema-sweep DIR --sigma_rel 0.05 0.10 0.15``: build averages of any width after the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files import read, weights_alone, write
from lit_efficient.snapshots import synthesize


def run(argv: list[str]) -> int:
    """Answer ``ema-sweep``. Errors are raised: the caller prints them.

    Args:
        argv: The arguments after the subcommand's name.
    """
    parser = argparse.ArgumentParser("python -m lit_efficient ema-sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="DIR", help="the folder of snapshots that PowerEMA wrote")
    parser.add_argument("--sigma_rel", type=float, nargs="+", required=True, help="widths to build, as shares of a run")
    parser.add_argument("--step", type=int, help="where the averages end; the last snapshot's step if left out")
    parser.add_argument("--checkpoint", help="a checkpoint of the run: its other weights complete what is written")
    parser.add_argument("--output", help="the folder to write to; that of the snapshots if left out")
    options = parser.parse_args(argv)
    base = read(options.checkpoint) if options.checkpoint else None
    output = Path(options.output or options.folder)
    suffix = ".safetensors" if base is None else ".ckpt"
    averages = synthesize(options.folder, options.sigma_rel, options.step)
    for sigma_rel, average in zip(options.sigma_rel, averages):
        path = output / f"ema-sigma_rel={sigma_rel:g}{suffix}"
        write(path, {"state_dict": average} if base is None else _completed(base, average, options.checkpoint))
        print(f"Wrote {path}")
    return 0


def _completed(base: dict[str, Any], average: dict[str, Tensor], path: str) -> dict[str, Any]:
    """The checkpoint ``base`` with the averaged weights in place of its own, tied ones too."""
    state = base["state_dict"]
    if unknown := sorted(average.keys() - state.keys()):
        raise ConfigurationError(f"{path} has no {unknown[0]!r}, which the snapshots hold: is it of the same run?")
    alias = {tensor.data_ptr(): name for name, tensor in state.items() if name in average}
    completed = dict(state)
    for name, tensor in state.items():
        source = name if name in average else alias.get(tensor.data_ptr() if isinstance(tensor, Tensor) else None)
        if source is not None:
            completed[name] = average[source].to(tensor.dtype)
    return weights_alone(base, completed, "ema")

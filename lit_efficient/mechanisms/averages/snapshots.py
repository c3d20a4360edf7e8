"""Snapshots of averages: one file of weights per step and width, from which averages of any width can be built.

    average of width s at step T = sum_i c_i snapshot_i

The coefficients c come from :func:`lit_efficient.mechanisms.averages.weights.synthesis_weights`.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import CheckpointError, refusal
from lit_efficient.files.checkpoints import local_file, read
from lit_efficient.files.tensors import metadata_of, save_tensors, zeros_in_file
from lit_efficient.mechanisms.averages.weights import add_share, precise, synthesis_weights

_NAME = re.compile(r"average-step=(\d+)-sigma_rel=([0-9.e-]+)\.safetensors")


@dataclass(frozen=True, order=True)
class Snapshot:
    """Key of a snapshot: an average of width ``sigma_rel`` after ``step`` updates."""

    step: int
    sigma_rel: float

    @property
    def filename(self) -> str:
        """Name of the file. It holds both fields."""
        return f"average-step={self.step:08d}-sigma_rel={self.sigma_rel!r}.safetensors"


def write_snapshot(
    folder: Path, snapshot: Snapshot, tensors: dict[str, Tensor], run: Collection[Snapshot] = (), dtype: Any = None
) -> None:
    """Write one snapshot atomically.

    Args:
        folder: Folder of the run's snapshots.
        snapshot: Step and width, which give the file's name.
        tensors: Weights by name.
        run: All snapshots that the run has written until this step, this one included. They are recorded in the file,
            so that a missing one is noticed.
        dtype: Dtype of the weights in the file. ``None`` keeps theirs.
    """
    metadata = {}
    if run:
        metadata["run"] = json.dumps([[other.step, other.sigma_rel] for other in run])
    save_tensors(folder / snapshot.filename, tensors, dtype, **metadata)


def find_snapshots(folder: str | Path) -> list[Snapshot]:
    """Return the snapshots in a folder in the order of their steps.

    Raises:
        CheckpointError: If there are none.
    """
    matches = (_NAME.fullmatch(path.name) for path in local_file(folder).glob("average-step=*"))
    found = sorted(Snapshot(int(match[1]), float(match[2])) for match in matches if match)
    if not found:
        raise CheckpointError(
            f"there are no snapshots in {folder}: PowerEMA writes files average-step=*-sigma_rel=*.safetensors"
        )
    return found


def synthesize(folder: str | Path, sigma_rels: Sequence[float], step: int | None = None) -> list[dict[str, Tensor]]:
    """Build averages of any width from the snapshots in a folder: one state dict per width, in float32 at least.

    Args:
        folder: Folder to which :class:`lit_efficient.PowerEMA` wrote the snapshots.
        sigma_rels: Widths to build, each above 0 and below 0.2887. Widths between the tracked ones are the most exact.
            Widths up to about twice the widest tracked one are good.
        step: Step at which the averages end. It must be the step of a snapshot. ``None`` selects the last.

    Raises:
        ConfigurationError: For a width out of range or a step without a snapshot.
        CheckpointError: If there are no snapshots, or one is missing or cannot be read.
    """
    folder = local_file(folder)
    found = find_snapshots(folder)
    steps = sorted({snapshot.step for snapshot in found})
    end = steps[-1] if step is None else step
    if end not in steps:
        raise refusal("synthesize", "step", f"one of the {len(steps)} of the snapshots {steps[:20]}", step)
    used = [snapshot for snapshot in found if snapshot.step <= end]
    _check_complete(folder, used)
    stored = [snapshot.sigma_rel for snapshot in used]
    shares = [synthesis_weights([snapshot.step for snapshot in used], stored, end, s) for s in sigma_rels]
    built: list[dict[str, Tensor]] = []
    for i, snapshot in enumerate(used):
        state = read(folder / snapshot.filename)["state_dict"]
        if i == 0:
            kinds = [(tensor.shape, precise(tensor.dtype)) for tensor in state.values()]
            # The sums are pages of a temporary file, so that several widths of a large network need little memory.
            built = [dict(zip(state, zeros_in_file(kinds, folder))) for _ in shares]
        for name, tensor in state.items():
            for width, share in zip(built, shares):
                add_share(width[name], tensor, share[i], first=not i)
    return built


def _check_complete(folder: Path, used: Sequence[Snapshot]) -> None:
    """Raise CheckpointError if snapshots of the run are missing, because the result would be another average."""
    last = folder / used[-1].filename
    read(last)  # raises if the file is damaged
    recorded = json.loads(metadata_of(last).get("run", "[]"))
    wanted = {Snapshot(int(step), float(width)) for step, width in recorded}
    missing = sorted(wanted - set(used))
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(wanted)} snapshots are missing in {folder}, first {missing[0].filename}: the "
            "result would be another average. If the run was resumed, put the snapshots of both parts into one folder"
        )

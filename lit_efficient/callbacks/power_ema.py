"""Power-function averages: track averages of a few widths, and build an average of any width from snapshots later.

    average_t <- average_(t-1) + (1 - (1 - 1/t)^(g+1)) (weights_t - average_(t-1)),    g from sigma_rel

Saves: a run for each width to try: the best width depends on the task and is known only after the run
Costs: 4 bytes for each parameter and one pass over memory per step, for each tracked width; snapshots on disk
Source: Karras et al. (2024), https://arxiv.org/abs/2312.02696

``python -m lit_efficient ema-sweep DIR --sigma_rel 0.05 0.10 0.15`` builds averages of these widths. With ``-c CONFIG
--checkpoint FILE`` it also validates and plots them. From 20 snapshots at two widths, averages of widths between 0.05
and 0.15 have an error of at most 0.1 % of the distance between average and weights, which is the smallest error of any
linear combination of the snapshots. With n times as many snapshots the error is n^2 times smaller.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, check_choice, check_list, check_number, refusal
from lit_efficient.mechanisms.averages.shadow import outside_autograd
from lit_efficient.mechanisms.averages.snapshots import Snapshot, write_snapshot
from lit_efficient.mechanisms.averages.weights import (
    gamma_of,
    placed_like,
    power_decay,
    precise,
    tracked_weights,
    update_,
    whole,
)
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PowerEMA(Technique):
    """Track weight averages of several widths and write snapshots of them, from which any width can be built later.

    Training and evaluation do not change. Add EMA to evaluate with an average during the run. The averages are updated
    after each optimizer step.

    Args:
        sigma_rels: Widths to track, as shares of the run, above 0 and below 0.2887, without repetition. Two are enough.
        snapshot_every_n_steps: Number of steps between two snapshots, at least 1. About 20 snapshots in a run are
            enough.
        dirpath: Folder of the snapshots; null for ``snapshots`` in the trainer's log folder.
        dtype: Number format of the snapshots: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        ConfigurationError: For an argument out of range, and if no parameter trains.
    """

    counts_steps = True
    phase = Phase.AVERAGE
    traits = frozenset({Trait.FOLLOWS_PARAMETERS, Trait.LEAVES_TRACES})
    conflicts: ClassVar[dict[str, str]] = {
        # Both act in the same hook, so that their order in the list would decide which weights are averaged.
        "EMA(switch_every=...)": "it replaces the weights that PowerEMA averages; leave out switch_every"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "averages of any width, chosen after the run")}

    def __init__(
        self,
        sigma_rels: Sequence[float] = (0.05, 0.10),
        snapshot_every_n_steps: int = 1000,
        dirpath: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        check_list("PowerEMA", "sigma_rels", sigma_rels, "a list of widths, each once")
        self.sigma_rels = tuple(sigma_rels)
        if len(set(self.sigma_rels)) < len(self.sigma_rels):
            raise refusal("PowerEMA", "sigma_rels", "a list of widths, each once", sigma_rels)
        for sigma_rel in self.sigma_rels:
            check_number("PowerEMA", "sigma_rels", sigma_rel, above=0, below=12**-0.5)
        check_number("PowerEMA", "snapshot_every_n_steps", snapshot_every_n_steps, least=1, whole=True)
        check_choice("PowerEMA", "dtype", dtype, _DTYPES)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.dirpath = dirpath
        self.dtype = dtype
        self._averages: list[dict[str, Tensor]] = []  # one for each width
        self._updates = 0
        self._steps: list[int] = []  # numbers of updates at which this run has written snapshots
        self._parameters: dict[str, nn.Parameter] = {}
        self._step = 0

    def describe(self, module: Any) -> Report:
        tracked = tracked_weights(module, "PowerEMA")
        size = len(self.sigma_rels) * sum(p.numel() * precise(p.dtype).itemsize for p in tracked.values())
        widths = ", ".join(f"{sigma_rel:g}" for sigma_rel in self.sigma_rels)
        return Report(
            f"{len(tracked)} tensors at widths {widths} ({format_bytes(size)}), a snapshot every "
            f"{self.snapshot_every_n_steps} steps in {self._folder(module.trainer)}",
            parameters=sum(p.numel() for p in tracked.values()),
            details={"average_bytes": size},
        )

    def _folder(self, trainer: Trainer) -> Path:
        if self.dirpath:
            return Path(self.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / "snapshots"

    @outside_autograd
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        tracked = tracked_weights(pl_module, "PowerEMA")
        self._parameters = tracked
        averages = []
        for i in range(len(self.sigma_rels)):
            source = self._averages[i] if self._updates else tracked
            averages.append({name: placed_like(source[name], p, precise(p.dtype)) for name, p in tracked.items()})
        self._averages = averages
        self._step = trainer.global_step
        self._path = Path(trainer.strategy.broadcast(str(self._folder(trainer))))

    @outside_autograd
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._updates += 1
        for sigma_rel, average in zip(self.sigma_rels, self._averages):
            decay = power_decay(self._updates, gamma_of(sigma_rel))
            update_(list(average.values()), list(self._parameters.values()), decay)
        if self._updates % self.snapshot_every_n_steps == 0:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a snapshot of the last step, for which averages are usually built."""
        if self._updates and self._updates % self.snapshot_every_n_steps:
            self._write(trainer)
        self._parameters = {}

    def _write(self, trainer: Trainer) -> None:
        self._steps = [step for step in self._steps if step < self._updates] + [self._updates]
        run = [Snapshot(step, sigma_rel) for step in self._steps for sigma_rel in self.sigma_rels]
        for sigma_rel, average in zip(self.sigma_rels, self._averages):
            tensors = {name: whole(tensor) for name, tensor in average.items()}
            if trainer.is_global_zero:
                write_snapshot(self._path, Snapshot(self._updates, sigma_rel), tensors, run, _DTYPES[self.dtype])

    def state_dict(self) -> dict[str, Any]:
        averages = [{name: whole(tensor) for name, tensor in average.items()} for average in self._averages]
        counts = {"updates": self._updates, "steps": list(self._steps)}
        return {"averages": averages, **counts, "sigma_rels": list(self.sigma_rels)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["sigma_rels"] != list(self.sigma_rels):
            raise ConfigurationError(
                f"PowerEMA: the checkpoint tracks the widths {state_dict['sigma_rels']}, but sigma_rels is "
                f"{list(self.sigma_rels)}. Set sigma_rels to the checkpoint's widths to resume"
            )
        self._averages = [dict(average) for average in state_dict["averages"]]
        self._updates = int(state_dict["updates"])
        self._steps = list(state_dict["steps"])

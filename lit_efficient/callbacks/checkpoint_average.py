"""Average of the last weights of a run (LAWA, SWA): the quality of a decayed learning rate without decaying it.

    average = sum_i w_i weights(step_i),    i over the last k snapshots, taken every n steps; w uniform, linear or 2^i

Saves: training steps to the same quality under a constant or cyclic learning rate, and the choice of when to decay it
Costs: k copies of the weights in CPU memory, and one more during validation; forward passes for BatchNorm statistics
Source: LAWA: Kaddour (2022), https://arxiv.org/abs/2209.14981; SWA: Izmailov et al. (2018), https://arxiv.org/abs/1803.05407
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import CheckpointError, ConflictError, check_choice, check_number, refusal
from lit_efficient.mechanisms.averages.batch_norm import batch_norms, recompute_statistics, statistics_of
from lit_efficient.mechanisms.averages.shadow import ShadowWeights, outside_autograd
from lit_efficient.mechanisms.averages.weights import (
    on_host,
    placed_like,
    position_weights,
    precise,
    tracked_weights,
    update_,
    weighted_mean,
    whole,
)
from lit_efficient.surgery import is_sharded
from lit_efficient.traits import Trait

_WEIGHTS = ("uniform", "linear", "exponential")


class CheckpointAverage(ShadowWeights):
    """Evaluate with the average of the last weights of the run, and save the average in weights-only checkpoints.

    Training and its learning rate do not change: use a constant or cyclic rate. For SWA set ``last_k=None``,
    ``start_step`` to about 75 % of the run, and ``every_n_steps`` to the length of a cycle. If cycles end at multiples
    of ``every_n_steps``, snapshots are taken at the lowest rates, where weights are best. Statistics of BatchNorm
    layers are computed again for the average, from training batches that are drawn for this purpose.

    Args:
        last_k: Number of snapshots in the average, at least 1. ``None`` averages all of them, in the memory of one
            (SWA).
        every_n_steps: Number of optimizer steps between two snapshots, at least 1.
        weights: Weights of the snapshots: ``uniform``, ``linear`` (1, 2, ... k for the newest) or ``exponential`` (each
            half of the next one).
        start_step: Number of optimizer steps before the first snapshot may be taken, at least 0.
        bn_batches: Number of batches from which statistics of BatchNorm are computed, at least 1.

    Raises:
        ConfigurationError: For an argument out of range, and if no parameter trains.
        ConflictError: For a network with BatchNorm in a module with manual optimization.
    """

    counts_steps = True
    label = "average"
    phase = Phase.AVERAGE
    traits = frozenset({Trait.FOLLOWS_PARAMETERS, Trait.SWAPS_WEIGHTS})
    helps = {"quality": (2, "averages the last weights of a constant rate")}

    def __init__(
        self,
        last_k: int | None = 5,
        every_n_steps: int = 1000,
        weights: str = "uniform",
        start_step: int = 0,
        bn_batches: int = 32,
    ) -> None:
        super().__init__()
        check_number("CheckpointAverage", "last_k", last_k, least=1, whole=True, null=True)
        check_choice("CheckpointAverage", "weights", weights, _WEIGHTS)
        if last_k is None and weights != "uniform":
            raise refusal("CheckpointAverage", "weights", "uniform if last_k is null", weights)
        check_number("CheckpointAverage", "every_n_steps", every_n_steps, least=1, whole=True)
        check_number("CheckpointAverage", "bn_batches", bn_batches, least=1, whole=True)
        check_number("CheckpointAverage", "start_step", start_step, least=0, whole=True)
        self.last_k = last_k
        self.every_n_steps = every_n_steps
        self.weights = weights
        self.start_step = start_step
        self.bn_batches = bn_batches
        self._snapshots: list[dict[str, Tensor]] = []  # oldest first; the mean of all if last_k is None
        self._count = 0
        self._mean: dict[str, Tensor] | None = None  # mean of the snapshots, computed when it is needed
        self._statistics: dict[str, Tensor] | None = None  # BatchNorm's buffers for the mean
        self._raw_statistics: dict[str, Tensor] | None = None  # those of the raw weights, while the mean is in use
        self._step = 0

    def describe(self, module: nn.Module) -> Report:
        tracked = tracked_weights(module, "CheckpointAverage").values()
        size = sum(p.nbytes for p in tracked) * (self.last_k or 1)
        chosen = f"the last {self.last_k}" if self.last_k else "all"
        summary = (
            f"{self.weights} mean of {chosen} snapshots, one every {self.every_n_steps} steps, {len(tracked)} tensors, "
            f"{format_bytes(size)} of CPU memory"
        )
        norms = len(batch_norms(module))
        if norms:
            summary += f", statistics of {norms} BatchNorm layers computed again"
        parameters = sum(p.numel() for p in tracked)
        return Report(summary, parameters=parameters, details={"snapshot_bytes": size})

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        if batch_norms(module) and not module.automatic_optimization:
            raise ConflictError(
                "CheckpointAverage computes statistics of BatchNorm by calling training_step, but "
                f"{type(module).__name__} uses manual optimization, so that each call would step the optimizers. Use "
                "GroupNorm or LayerNorm, or EMA"
            )

    @outside_autograd
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._place(pl_module)
        self._step = trainer.global_step

    @outside_autograd
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        before = self._step
        self._step = trainer.global_step
        # Several optimizers count several steps at a time, so a multiple may be passed without being reached.
        due = self._step // self.every_n_steps > before // self.every_n_steps
        if (due and self._step > self.start_step) or self.worst_case:
            self._take(tracked_weights(pl_module, "CheckpointAverage"))
        while self.worst_case and len(self._snapshots) < (self.last_k or 1):
            self._snapshots.append({name: tensor.clone() for name, tensor in self._snapshots[0].items()})

    def _take(self, tracked: Mapping[str, nn.Parameter]) -> None:
        """Take a snapshot of the weights, and drop the oldest one if there are more than ``last_k``."""
        self._mean = None
        self._statistics = None
        self._count += 1
        if self.last_k is None and self._count > 1:
            mean = self._snapshots[0]
            names = mean.keys() & tracked.keys()  # without parameters that were frozen or unfrozen since
            update_([mean[n] for n in names], [tracked[n] for n in names], 1 - 1 / self._count)
            return
        # Shards stay with their mesh, all other tensors are copied to the CPU.
        moved = [n for n, p in tracked.items() if not is_sharded(p)]
        host = dict(zip(moved, on_host([tracked[n].detach() for n in moved])))
        snapshot = {}
        for n, p in tracked.items():
            dtype = precise(p.dtype) if self.last_k is None else p.dtype
            snapshot[n] = placed_like(host.get(n, p), p, dtype, "cpu" if n in host else None)
        self._snapshots.append(snapshot)
        del self._snapshots[: -(self.last_k or 1)]

    @outside_autograd
    def average(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        if self._mean is None and self._snapshots:
            self._place(module)
            names = list(self._snapshots[0])
            weights = position_weights(len(self._snapshots), self.weights)
            mean = weighted_mean([[snapshot[n] for n in names] for snapshot in self._snapshots], weights)
            self._mean = dict(zip(names, mean))
        return self._mean

    def _place(self, module: nn.Module) -> None:
        """Shard restored snapshots like their parameters."""
        parameters = dict(module.named_parameters())
        for snapshot in self._snapshots:
            for name, tensor in snapshot.items():
                if name in parameters and is_sharded(parameters[name]) and not is_sharded(tensor):
                    snapshot[name] = placed_like(tensor, parameters[name], tensor.dtype)

    def shares(self, steps: int) -> list[float] | None:
        taken = [step for step in range(self.every_n_steps, steps + 1, self.every_n_steps) if step > self.start_step]
        if not taken:
            return None
        taken = taken[-(self.last_k or len(taken)) :]
        share = dict(zip(taken, position_weights(len(taken), self.weights)))
        return [share.get(step, 0.0) for step in range(1, steps + 1)]

    def buffers_for(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the statistics of BatchNorm that were computed for the average."""
        if self._statistics is None and any(key.endswith(".running_mean") for key in state):
            raise CheckpointError(
                "CheckpointAverage: the checkpoint has the average, but not its statistics of BatchNorm, which a "
                "validation computes: save weights only (save_weights_only=True), or use the raw weights"
            )
        return self._statistics or {}

    def forget(self) -> None:
        self._snapshots = []
        self._count = 0
        self._mean = None
        self._statistics = None

    @outside_autograd
    def swap_in(self, module: nn.Module) -> None:
        was_in = self._raw is not None
        super().swap_in(module)
        if was_in or self._raw is None or not batch_norms(module):
            return
        if self._statistics is None:
            self._statistics = recompute_statistics(module, self.bn_batches, who="CheckpointAverage")
        self._raw_statistics = statistics_of(module)
        _restore(module, self._statistics)

    @outside_autograd
    def swap_out(self, module: nn.Module) -> None:
        super().swap_out(module)
        if self._raw_statistics is not None:
            _restore(module, self._raw_statistics)
        self._raw_statistics = None

    def write_checkpoint(self, checkpoint: dict[str, Any], module: nn.Module) -> None:
        weights_only = "callbacks" not in checkpoint
        if weights_only and self._snapshots and self._statistics is None and batch_norms(module):
            with self.averaged(module):  # computes the statistics
                pass
        super().write_checkpoint(checkpoint, module)
        statistics = self._statistics if weights_only else self._raw_statistics
        for name, tensor in (statistics or {}).items():
            if name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = tensor

    def state_dict(self) -> dict[str, object]:
        """Return whole snapshots, and the statistics, because a later evaluation cannot compute them."""
        snapshots = [{n: whole(t) for n, t in snapshot.items()} for snapshot in self._snapshots]
        return {"snapshots": snapshots, "count": self._count, "statistics": self._statistics or {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._mean = None
        self._statistics = dict(state_dict["statistics"]) or None
        self._snapshots = [dict(snapshot) for snapshot in state_dict["snapshots"]]
        self._count = int(state_dict["count"])


def _restore(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    own = dict(module.named_buffers())
    for name, tensor in buffers.items():
        own[name].copy_(tensor)

"""Batch-size warm-up: train with small batches first, and with the full batch from the last milestone on.

    batch at step t = full / factor^(milestones > t)
    Seesaw:  where a schedule would halve the rate, double the batch and divide the rate by sqrt(2) instead

Saves: time on devices that use larger batches better; with Seesaw a third of the sequential steps of a cosine run
Costs: small batches use a device less well; gradients of the first steps are noisier
Source: Smith et al. (2018), https://arxiv.org/abs/1711.00489; McCandlish et al. (2018), https://arxiv.org/abs/1812.06162;
    Seesaw: Meterez et al. (2025), https://arxiv.org/abs/2510.14717

The full batch is the loader's batch times ``accumulate_grad_batches``. A smaller batch accumulates fewer micro-batches.
If it is smaller than one micro-batch, the loader's batches are split into pieces, and each piece is a step. All rows
are used, in the same order. The learning rate is that of the schedule: for Seesaw use
``torch.optim.lr_scheduler.MultiStepLR`` with the same milestones and ``gamma = factor ** -0.5``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.settings import ReadBack, who_sets
from lit_efficient.declaration import Phase, Report, technique_of
from lit_efficient.errors import ConfigurationError, ConflictError, check_list, check_number, refusal
from lit_efficient.internals.lightning_data import combined_loader
from lit_efficient.internals.lightning_loops import recount
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.order.piecewise_loader import PiecewiseLoader
from lit_efficient.mechanisms.ramps import steps_of
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def seesaw_milestones(steps: int, doublings: int) -> list[int]:
    """Return the steps at which Seesaw doubles the batch, where a half cosine would have halved the rate.

    Args:
        steps: Number of steps of the run that is replaced, which has the first batch size throughout; at least 1.
        doublings: Number of doublings of the batch, at least 1.

    Returns:
        The milestones, in steps of the new run. It trains on as many samples as the replaced run if it ends
        ``(1 - arccos(2^(1 - doublings) - 1) / pi) * steps / 2^doublings`` steps after the last milestone.

    Raises:
        ConfigurationError: For an argument out of range.

    Example:
        >>> seesaw_milestones(6000, 2)
        [3000, 3500]
    """
    check_number("seesaw_milestones", "steps", steps, least=1, whole=True)
    check_number("seesaw_milestones", "doublings", doublings, least=1, whole=True)
    # Fraction of the half cosine after which the rate is 2^-k of its first value.
    fractions = [math.acos(2 ** (1 - k) - 1) / math.pi for k in range(doublings + 1)]
    milestones = []
    reached = 0.0
    for k in range(doublings):
        reached += (fractions[k + 1] - fractions[k]) * steps / 2**k
        milestones.append(round(reached))
    return milestones


class BatchRamp(Technique):
    """Begin with a fraction of the effective batch, and multiply it at each milestone until it is the full one.

    Counters are exact: tokens and samples, steps of the schedule, logged steps. An epoch has more steps while batches
    are small, so set the length of the run and of its schedule by ``max_steps``, not by epochs. A new size begins with
    a whole batch of the loader, at an index that is a multiple of the old and the new accumulation.

    Args:
        milestones: Optimizer steps (``trainer.global_step``) at which the batch grows, ascending, at least 1. Or
            fractions of ``max_steps``, above 0 and below 1.
        factor: Factor by which each milestone multiplies the batch, at least 2. ``accumulate_grad_batches`` must be a
            multiple or a divisor of each power of it up to ``factor ** len(milestones)``. If the largest power exceeds
            ``accumulate_grad_batches``, batches of the loader are split.

    Raises:
        ConfigurationError: For an argument out of range, fractions without ``max_steps``, a full batch that cannot be
            divided this way; and, if batches are split, for several loaders and for ``limit_train_batches`` or
            ``val_check_interval`` as fractions.
        ConflictError: With manual optimization, and with strategies that accumulate by themselves.
    """

    counts_steps = True
    phase = Phase.LOSS
    traits = frozenset({Trait.CHANGES_ACCUMULATION})
    needs = ("milestones",)
    conflicts = {
        "MaxBatchSize": "both set accumulate_grad_batches: find the size in a run without BatchRamp, and set it",
        "OptimizerInBackward": "it steps in each backward pass, and accumulates nothing: leave one of them out",
    }
    helps = {"speed": (0, "small batches while their gradients suffice")}

    def __init__(self, milestones: Sequence[int | float], factor: int = 2) -> None:
        super().__init__()
        check_number("BatchRamp", "factor", factor, least=2, whole=True)
        allowed = "steps from 1 on or fractions between 0 and 1, in ascending order"
        check_list("BatchRamp", "milestones", milestones, allowed)
        fractions = all(isinstance(value, float) and 0 < value < 1 for value in milestones)
        steps = all(type(value) is int and value > 0 for value in milestones)
        if not (fractions or steps) or sorted({*milestones}) != [*milestones]:
            raise refusal("BatchRamp", "milestones", allowed, milestones)
        self.milestones = milestones
        self.factor = factor
        self._steps: list[int] = []
        self._full = 1  # accumulate_grad_batches of the trainer
        self._now: int | None = None  # current accumulation
        self._loader: PiecewiseLoader | None = None
        self._reads: ReadBack | None = None

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise ConflictError(
                f"BatchRamp sets accumulate_grad_batches, but {type(module).__name__} uses manual optimization, which "
                "ignores it: leave BatchRamp out"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise ConflictError(f"BatchRamp: {type(trainer.strategy).__name__} accumulates by itself; use DDP or FSDP2")
        self._milestone_steps(trainer)
        full = trainer.accumulate_grad_batches
        most = self.factor ** len(self.milestones)
        for k in range(len(self.milestones) + 1):
            divisor = self.factor**k
            if full % divisor and divisor % full:
                raise ConfigurationError(
                    f"BatchRamp: {len(self.milestones)} milestones begin with 1/{most} of the batch, but "
                    f"accumulate_grad_batches={full} is neither a multiple nor a divisor of {divisor}: change it, or "
                    "factor"
                )
        if most <= full:
            return
        for setting in ("limit_train_batches", "val_check_interval"):
            value = getattr(trainer, setting)
            if isinstance(value, float) and value != 1.0:
                raise ConfigurationError(
                    f"BatchRamp: Trainer({setting}={value:g}) is a fraction of an epoch, whose length changes when "
                    "batches are split: set a number of batches"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._full = trainer.accumulate_grad_batches
            self._now = None
            self._loader = None
            self._steps = self._milestone_steps(trainer)
            wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        self._stop_reading()
        if self._now is not None:
            trainer.accumulate_grad_batches = self._full
            self._now = None
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        first = self.factor ** len(self.milestones)
        times = ", ".join(map(str, self._steps or self.milestones))
        return Report(f"1/{first} of the batch at first, {self.factor} times as much from steps {times} on")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the accumulation of the checkpoint, and recount the epoch's pieces from the loader's state."""
        if self._now is None:
            self._now = self._accumulation(trainer.global_step)
        trainer.accumulate_grad_batches = self._now
        self._read_back(trainer)
        if self._loader is not None:
            if len(loaders_in(combined_loader(trainer))) > 1:
                raise ConfigurationError(
                    "BatchRamp: batches of several loaders cannot be split: raise accumulate_grad_batches"
                )
            recount(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loader is not None:
            self._loader.begin_epoch()
            recount(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Change the accumulation at a batch where an old window has ended and a new one can begin."""
        if self.worst_case:
            wanted = self._full
        else:
            wanted = self._accumulation(trainer.global_step)
        if wanted != self._now and batch_idx % wanted == 0 and batch_idx % (self._now or 1) == 0:
            if not self.worst_case:
                rank_zero_info(f"BatchRamp: step {trainer.global_step}: {wanted} micro-batches per step")
            self._now = wanted
            trainer.accumulate_grad_batches = wanted
            self._read_back(trainer)

    def _read_back(self, trainer: Trainer) -> None:
        self._stop_reading()
        self._reads = ReadBack(trainer.optimizers, partial(self._differs, trainer))

    def _stop_reading(self) -> None:
        if self._reads is not None:
            self._reads.stop()
            self._reads = None

    def _differs(self, trainer: Trainer, optimizer: Optimizer, step: int) -> str | None:
        """Return a sentence if a step accumulates another number of batches than the ramp has set."""
        if trainer.accumulate_grad_batches == self._now:
            return None
        return (
            f"BatchRamp: step {trainer.global_step} should accumulate {self._now} batches, but accumulate_grad_batches "
            f"is {trainer.accumulate_grad_batches}: {who_sets(trainer.lightning_module)} sets it, too. Leave out one "
            "of them"
        )

    def state_dict(self) -> dict[str, object]:
        """Return the current accumulation: a window of the old size may still be open."""
        if self._now is None:
            return {}
        return {"accumulation": self._now}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._now = state_dict.get("accumulation")

    def _milestone_steps(self, trainer: Trainer) -> list[int]:
        return [steps_of("BatchRamp", "milestones", value, trainer) for value in self.milestones]

    def _parts(self, step: int) -> int:
        """Return the number of parts into which the full batch is divided at a step."""
        return self.factor ** (len(self._steps) - bisect_right(self._steps, step))

    def _accumulation(self, step: int) -> int:
        return max(1, self._full // self._parts(step))

    def _piecewise(self, trainer: Trainer, loader: object) -> Any:
        """Return the loader, or one that splits its batches if a stage has less than one of them per step."""
        stages = []
        for end in self._steps:
            pieces = self._parts(end - 1) // self._full
            if pieces > 1:
                stages.append((end, pieces))
        if not stages:
            return loader
        if not hasattr(loader, "__len__"):
            raise ConfigurationError(
                f"BatchRamp: a {type(loader).__name__} has no length, so its batches cannot be split: raise "
                "accumulate_grad_batches"
            )
        rows = getattr(loader, "batch_size", None)
        if rows is None:
            rows = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        most = max(pieces for _, pieces in stages)
        if isinstance(rows, int) and most > rows:
            raise ConfigurationError(
                f"BatchRamp: {len(self.milestones)} milestones with factor={self.factor} divide each batch of {rows} "
                f"rows into {most} parts: set a smaller factor, fewer milestones or a larger batch"
            )
        before = self._loader
        self._loader = PiecewiseLoader(loader, stages)
        if before is not None:  # Lightning may create the loader again between epochs
            self._loader.given = before.given
        return self._loader


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    """Wrap of ``strategy.process_dataloader`` that splits the batches of a training loader."""
    trainer = self.lightning_module.trainer
    loader = inner_method(self, "process_dataloader", _process_dataloader)(dataloader)
    technique = technique_of(trainer, BatchRamp)
    if technique is None or not trainer.training:
        return loader
    return technique._piecewise(trainer, loader)

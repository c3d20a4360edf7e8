"""Batch-size warm-up: small batches first, which take more and cheaper steps, the full one from the last milestone on.

    batch at step t = full / factor^(milestones > t)
    Seesaw:  where a schedule would halve the rate, double the batch and divide the rate by sqrt(2) instead

Saves: time on devices that a larger batch uses better; steps in a row, a third of a cosine run's with Seesaw
Costs: small batches use a device worse; the first steps' gradients are noisier
Source: Smith et al. (2018), https://arxiv.org/abs/1711.00489; McCandlish et al. (2018), https://arxiv.org/abs/1812.06162;
    Seesaw: Meterez et al. (2025), https://arxiv.org/abs/2510.14717

The full batch is the loader's times ``accumulate_grad_batches``. A smaller one accumulates fewer micro-batches, and
where one is too many, the loader's batches are handed out in pieces, each of which is a step. All rows are trained on,
in the same order. The rate of each stage is the schedule's: ``torch.optim.lr_scheduler.MultiStepLR`` with the same
milestones and ``gamma = factor ** -0.5`` is Seesaw's.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_data import combined_loader
from lit_efficient.internals.lightning_loops import recount
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.order.piecewise_loader import PiecewiseLoader
from lit_efficient.mechanisms.ramps import steps_of
from lit_efficient.mechanisms.trials.probes import loaders_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def seesaw_milestones(steps: int, doublings: int) -> list[int]:
    """Steps at which the batch doubles, where half a cosine over ``steps`` of the first batch would halve the rate.

    Args:
        steps: Of the run that is replaced, with the first batch throughout, at least 1.
        doublings: How often the batch doubles, at least 1.

    Returns:
        The milestones, in steps of the new run. It trains on as many samples when it ends at the last one plus
        ``(1 - arccos(2^(1 - doublings) - 1) / pi) * steps / 2^doublings``.

    Raises:
        ConfigurationError: For an argument out of range.

    Example:
        >>> seesaw_milestones(6000, 2)
        [3000, 3500]
    """
    check_number("seesaw_milestones", "steps", steps, least=1, whole=True)
    check_number("seesaw_milestones", "doublings", doublings, least=1, whole=True)
    shares = [math.acos(2 ** (1 - k) - 1) / math.pi for k in range(doublings + 1)]  # of the cosine, at 2^-k
    lengths = [(shares[k + 1] - shares[k]) * steps / 2**k for k in range(doublings)]
    return [round(sum(lengths[: k + 1])) for k in range(doublings)]


class BatchRamp(Technique):
    """Begin with a fraction of the effective batch, and multiply it at each milestone until it is the full one.

    Everything counts as it is: tokens and samples, learning-rate steps, logged steps. An epoch has more steps while
    batches are small, so bound the run and its schedule by ``max_steps``, not by epochs. A new size begins
    with a whole batch of the loader, and where micro-batches are accumulated, with a window that leaves the following
    ones whole.

    Args:
        milestones: Optimizer steps (``trainer.global_step``) at which the batch grows, ascending, from 1; or all of
            them shares of ``max_steps``, above 0 and below 1.
        factor: What each milestone multiplies the batch by, at least 2. ``factor ** len(milestones)`` divides
            ``accumulate_grad_batches``, or is a multiple of it: then batches of the loader are cut.

    Raises:
        ConfigurationError: For an argument out of range, shares without ``max_steps``, a full batch that cannot be
            divided so, and batches to be cut of several loaders or with ``limit_train_batches`` or
            ``val_check_interval`` as shares.
        ConflictError: With manual optimization, and with strategies that accumulate by themselves.
    """

    phase = Phase.LOSS
    traits = frozenset({Trait.CHANGES_ACCUMULATION})
    needs = ("milestones",)
    conflicts: ClassVar[dict[str, str]] = {
        "MaxBatchSize": "both set accumulate_grad_batches: find the size in a run without BatchRamp, and set it",
        "OptimizerInBackward": "it steps in each backward pass, and accumulates nothing: leave one of the two out",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "small batches while their gradients suffice")}

    def __init__(self, milestones: Sequence[int | float], factor: int = 2) -> None:
        super().__init__()
        check_number("BatchRamp", "factor", factor, least=2, whole=True)
        shares = bool(milestones) and all(isinstance(one, float) and 0 < one < 1 for one in milestones)
        steps = bool(milestones) and all(type(one) is int and one > 0 for one in milestones)
        if not (shares or steps) or sorted({*milestones}) != [*milestones]:
            allowed = "steps from 1 on or shares between 0 and 1, each above the one before"
            raise refusal("BatchRamp", "milestones", allowed, milestones)
        self.milestones = milestones
        self.factor = factor
        self._steps: list[int] = []
        self._full = 1  # the trainer's own accumulation
        self._now: int | None = None  # that of now
        self._loader: PiecewiseLoader | None = None

    def check(self, trainer: Any, module: Any) -> None:
        name = type(module).__name__
        if not module.automatic_optimization:
            raise ConflictError(f"BatchRamp sets how much is accumulated, but {name} optimizes manually")
        if trainer.strategy.handles_gradient_accumulation:
            raise ConflictError(f"BatchRamp: {type(trainer.strategy).__name__} accumulates by itself; use DDP or FSDP2")
        self._of_run(trainer)
        full, most = trainer.accumulate_grad_batches, self.factor ** len(self.milestones)
        if any(full % size and size % full for size in (self.factor**k for k in range(len(self.milestones) + 1))):
            raise ConfigurationError(
                f"BatchRamp: {len(self.milestones)} milestones begin with 1/{most} of the batch, but "
                f"accumulate_grad_batches={full} is neither a multiple nor a divisor of the powers of {self.factor} up "
                "to that: set another"
            )
        for setting in ("limit_train_batches", "val_check_interval") if most > full else ():
            value = getattr(trainer, setting)
            if isinstance(value, float) and value != 1.0:
                raise ConfigurationError(
                    f"BatchRamp: Trainer({setting}={value:g}) is a share of an epoch, whose length changes where "
                    "batches are cut: give a whole number"
                )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._full, self._now, self._loader = trainer.accumulate_grad_batches, None, None
            self._steps = self._of_run(trainer)
            wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        if self._now is not None:
            trainer.accumulate_grad_batches, self._now = self._full, None
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        first = self.factor ** len(self.milestones)
        times = ", ".join(map(str, self._steps or self.milestones))
        return Report(f"1/{first} of the batch at first, {self.factor} times as much from steps {times} on")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Accumulate as the checkpoint's run did, and count the epoch's pieces once the loader's state is restored."""
        if self._now is None:
            self._now = self._accumulation(trainer.global_step)
        trainer.accumulate_grad_batches = self._now
        if self._loader is not None:
            if len(loaders_in(combined_loader(trainer))) > 1:
                raise ConfigurationError("BatchRamp: several loaders cannot be cut: raise accumulate_grad_batches")
            recount(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._loader is not None:
            self._loader.begin_epoch()
            recount(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Accumulate more where a window of the old size has ended and one of the new size can begin."""
        wanted = self._full if self.worst_case else self._accumulation(trainer.global_step)
        if wanted != self._now and batch_idx % wanted == 0 and batch_idx % (self._now or 1) == 0:
            if not self.worst_case:
                rank_zero_info(f"BatchRamp: step {trainer.global_step}: {wanted} micro-batches a step")
            trainer.accumulate_grad_batches = self._now = wanted

    def state_dict(self) -> dict[str, Any]:
        """How much is accumulated: a window of the old size may still be open."""
        return {} if self._now is None else {"accumulation": self._now}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._now = state_dict.get("accumulation")

    def _of_run(self, trainer: Any) -> list[int]:
        return [steps_of("BatchRamp", "milestones", one, trainer) for one in self.milestones]

    def _parts(self, step: int) -> int:
        """Into how many parts the full batch is divided."""
        return self.factor ** (len(self._steps) - bisect_right(self._steps, step))

    def _accumulation(self, step: int) -> int:
        return max(1, self._full // self._parts(step))

    def _piecewise(self, trainer: Any, loader: Any) -> Any:
        stages = [(end, self._parts(end - 1) // self._full) for end in self._steps]
        stages = [(end, count) for end, count in stages if count > 1]
        if not stages:
            return loader
        if not hasattr(loader, "__len__"):
            kind = type(loader).__name__
            raise ConfigurationError(
                f"BatchRamp: a {kind} has no length, and is not cut: raise accumulate_grad_batches"
            )
        before, self._loader = self._loader, PiecewiseLoader(loader, stages)
        if before is not None:  # loaders are made again between epochs
            self._loader.given = before.given
        return self._loader


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    """Around ``strategy.process_dataloader``: cuts what all others have made of a training loader."""
    trainer = self.lightning_module.trainer
    technique = next((one for one in trainer.callbacks if isinstance(one, BatchRamp)), None)
    made = inner_method(self, "process_dataloader", _process_dataloader)(dataloader)
    return technique._piecewise(trainer, made) if technique is not None and trainer.training else made

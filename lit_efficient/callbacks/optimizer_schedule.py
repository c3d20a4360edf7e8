"""Optimizer schedule: change weight decay and momentum during the run, apart from the learning rate or with it.

    value(t) = end + (start - end) * f(t / until),    f from 1 to 0: 1 - p (linear) or (1 + cos(pi p)) / 2 (cosine)
    weight_decay(t) = weight_decay * (lr(t) / lr_max)^follow_rate

A step shrinks weights by lr * weight_decay. With follow_rate = 1 (AdamC) the shrinkage falls with the square of the
rate, so that gradients of layers before a normalisation do not grow at the end of the run. With follow_rate = -1 it
does not change with the rate (independent weight decay).

Saves: nothing by itself; recipes that increase weight decay (DINO) or warm up momentum (Muon) are a block of YAML
Costs: nothing
Source: Caron et al. (2021), https://arxiv.org/abs/2104.14294; momentum: https://kellerjordan.github.io/posts/muon;
    AdamC: Defazio (2025), https://arxiv.org/abs/2506.02285; independent weight decay: Wortsman et al. (2023),
    https://arxiv.org/abs/2309.14322
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.settings import ReadBack, who_sets
from lit_efficient.declaration import Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_list, check_number, refusal
from lit_efficient.optimizers.rates import nested_schedulers
from lit_efficient.optimizers.schedules import decay_factor, steps_of
from lit_efficient.technique import Technique


class OptimizerSchedule(Technique):
    """Set the weight decay and the momentum of each step as functions of the step number.

    The scheduled weight decay applies to the parameter groups with the largest weight decay. Other groups keep their
    ratio to it, and groups without weight decay (biases, norms) stay without. Momentum is the setting ``momentum`` of
    the groups that have one, else the first number of ``betas``.

    Args:
        weight_decay: Weight decay at the start and at the end, at least 0; ``None`` for no change.
        momentum: Momentum at the start and at the end, at least 0 and below 1; ``None`` for no change.
        until: Step at which the end value is reached, or a share of the run's steps. The end value stays afterwards.
        shape: Shape of the transition, ``linear`` or ``cosine``.
        follow_rate: Power of the ratio of the learning rate to its maximum, by which weight decay is multiplied: 1 for
            AdamC, -1 for independent weight decay, ``None`` for no change. The maximum is the rate that the optimizer
            was built with, or ``max_lr`` of ``OneCycleLR``. Groups with ``"follow_rate": False`` are left out: for
            AdamC those of layers without a normalisation after them, such as the output layer.

    Raises:
        ConfigurationError: For an argument out of range, if the optimizer has neither setting, for a share of a run
            that has no end, and for ``follow_rate`` without a learning-rate schedule.
        ConflictError: If a scheduler such as ``OneCycleLR`` also changes the momentum, and for torchao's low-bit
            optimizers.
    """

    counts_steps = True
    needs = ("weight_decay",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "recipes that schedule weight decay or momentum")}

    def __init__(
        self,
        weight_decay: Sequence[float] | None = None,
        momentum: Sequence[float] | None = None,
        until: int | float = 1.0,
        shape: Literal["linear", "cosine"] = "cosine",
        follow_rate: float | None = None,
    ) -> None:
        super().__init__()
        for name, value, below in (("weight_decay", weight_decay, None), ("momentum", momentum, 1.0)):
            two = "two numbers (start and end) or null"
            check_list("OptimizerSchedule", name, value, two, null=True)
            if value is not None and len(value) != 2:
                raise refusal("OptimizerSchedule", name, two, value)
            for number in value or ():
                check_number("OptimizerSchedule", name, number, least=0, below=below)
        check_number("OptimizerSchedule", "follow_rate", follow_rate, null=True)
        if weight_decay is None and momentum is None and not follow_rate:
            raise ConfigurationError(
                "OptimizerSchedule: weight_decay, momentum and follow_rate are all null or 0. Set one of them"
            )
        if not steps_of("OptimizerSchedule", "until", until, 2**62):
            raise refusal("OptimizerSchedule", "until", "above 0", until)
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.until = until
        self.shape = shape
        self.follow_rate = follow_rate
        self._steps = 0  # number of steps until the end value is reached
        self._run: list[Any] = []  # max_steps and max_epochs of the run for which the steps were counted
        self._decays: list[list[float]] = []  # weight decay of each optimizer's groups, as a share of the largest
        self._expected: dict[int, list[dict[str, object]]] = {}  # settings of the next step, by the optimizer's id
        self._reads: ReadBack | None = None
        self._largest = 1.0  # the largest weight decay before the first step, or 1 if no group has any

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            # A checkpoint restores its own values later.
            self._decays = []
            self._run = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._reads is not None:
            self._reads.stop()
            self._reads = None
        self._expected = {}
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        parts = []
        for name, ends in (("weight decay", self.weight_decay), ("momentum", self.momentum)):
            if ends is not None:
                parts.append(f"{name} {ends[0]:g} to {ends[1]:g}")
        if self.follow_rate:
            parts.append(f"weight decay times (lr / lr_max)^{self.follow_rate:g}")
        return Report(", ".join(parts))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the steps of the run, before other callbacks change the accumulation.

        Raises:
            ConfigurationError: If ``until`` is a share and the run has no end.
        """
        super().on_fit_start(trainer, pl_module)
        run = [trainer.max_steps, trainer.max_epochs]
        if self._run == run:  # a resumed run keeps its number, although batches may have become fewer and larger
            return
        total = 0.0
        if isinstance(self.until, float):
            total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ConfigurationError(
                f"OptimizerSchedule: until={self.until:g} is a share of a run that has no end. Set until to a number "
                "of steps, or set max_steps or max_epochs of the trainer"
            )
        self._steps = max(1, steps_of("OptimizerSchedule", "until", self.until, int(total)))
        self._run = run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the groups.

        Raises:
            ConfigurationError: If no group has what is to be set.
            ConflictError: If a scheduler moves the momentum, too, or the step is compiled for each value.
        """
        if any(base.__module__.startswith("torchao.") for one in trainer.optimizers for base in type(one).__mro__):
            raise ConflictError(
                "OptimizerSchedule: torchao compiles its step again for each value of weight decay and betas. Use "
                "LowBitOptimizer(backend='bitsandbytes'), or leave out OptimizerSchedule"
            )
        decays = [[_decay(group) for group in one.param_groups] for one in trainer.optimizers]
        if [len(groups) for groups in self._decays] != [len(groups) for groups in decays]:
            self._largest = max(map(max, decays)) or 1.0  # 1 avoids a division by zero
            self._decays = [[decay / self._largest for decay in groups] for groups in decays]
        if (self.weight_decay is not None or self.follow_rate) and not any(map(any, self._decays)):
            raise ConfigurationError(
                "OptimizerSchedule: no group of the optimizer has a weight_decay above 0 and parameters"
            )
        if self.follow_rate and not any("initial_lr" in g for one in trainer.optimizers for g in one.param_groups):
            raise ConfigurationError(
                "OptimizerSchedule: follow_rate has no effect without a learning-rate schedule: leave it out, or set a "
                "schedule"
            )
        self._reads = ReadBack(trainer.optimizers, partial(self._differs, pl_module))
        if self.momentum is None:
            return
        if not any(_has_momentum(optimizer) for optimizer in trainer.optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise ConfigurationError(f"OptimizerSchedule: {kinds} has neither momentum nor betas to set")
        for scheduler in nested_schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
            if getattr(scheduler, "cycle_momentum", False):
                raise ConflictError(
                    f"OptimizerSchedule: {type(scheduler).__name__} also changes the momentum. Set its "
                    "cycle_momentum=False, or leave out momentum"
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Set the values of the next step, before the backward pass, in which some optimizers step."""
        left = decay_factor(self._progress(trainer, pl_module), self.shape)
        for optimizer, decays in zip(trainer.optimizers, self._decays, strict=True):
            for group in optimizer.param_groups[len(decays) :]:  # a callback has added groups, as BaseFinetuning does
                decays.append(_decay(group) / self._largest)
        for optimizer, decays in zip(trainer.optimizers, self._decays, strict=True):
            for group, share in zip(optimizer.param_groups, decays, strict=True):
                if share and (self.weight_decay is not None or self.follow_rate):
                    largest = self._largest if self.weight_decay is None else _between(self.weight_decay, left)
                    group["weight_decay"] = share * largest * _rate_factor(group, self.follow_rate)
            if self.momentum is not None:
                _set_momentum(optimizer, _between(self.momentum, left))
            self._expected[id(optimizer)] = [_settings(group) for group in optimizer.param_groups]

    def _differs(self, module: nn.Module, optimizer: Optimizer, step: int) -> str | None:
        """Return a sentence if the optimizer steps with other settings than those that were set."""
        for group, expected in zip(optimizer.param_groups, self._expected.get(id(optimizer), [])):
            for name, used in _settings(group).items():
                if used != expected.get(name):
                    return (
                        f"OptimizerSchedule: step {step} should have {name} {_shown(expected.get(name))}, but the "
                        f"optimizer has {_shown(used)}: {who_sets(module)} sets it, too. Leave out one of them"
                    )
        return None

    def _progress(self, trainer: Trainer, module: LightningModule) -> float:
        """Return the current step as a share of the steps until the end value.

        With manual optimization, several optimizers may step for each batch. ``global_step`` counts all of these steps,
        but the length of the run is known in batches, so that a share is computed from batches.
        """
        if module.automatic_optimization or not isinstance(self.until, float):
            return float(trainer.global_step / self._steps)
        batches = trainer.num_training_batches * max(0, trainer.max_epochs or 0)
        limits = [(trainer.fit_loop.total_batch_idx, batches), (trainer.global_step, trainer.max_steps)]
        return max(done / limit for done, limit in limits if limit > 0) / self.until

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the run and the groups' ratios, which cannot be computed once weight decay is 0."""
        return {"decays": self._decays, "largest": self._largest, "steps": self._steps, "run": self._run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._decays = state_dict["decays"]
        self._largest = state_dict["largest"]
        self._steps = state_dict["steps"]
        self._run = state_dict["run"]


def _between(ends: Sequence[float], left: float) -> float:
    """Return the value between start and end, where ``left`` is the share of the difference that remains."""
    start, end = ends
    return end + (start - end) * left


def _rate_factor(group: dict[str, Any], power: float | None) -> float:
    """Return the factor on the weight decay of a group, which is 1 while the learning rate is 0."""
    rate = float(group.get("lr", 0.0))
    most = float(group.get("max_lr", group.get("initial_lr", rate)))
    if not power or rate <= 0 or group.get("follow_rate") is False:
        return 1.0
    return (rate / most) ** power


def _decay(group: dict[str, Any]) -> float:
    """Return the weight decay of a group, which is 0 if the group has no parameters."""
    if group["params"]:
        return float(group.get("weight_decay", 0.0))
    return 0.0


def _settings(group: dict[str, Any]) -> dict[str, object]:
    """Return the settings of a group that a schedule may set."""
    settings: dict[str, Any] = {}
    for name in ("weight_decay", "momentum"):
        if name in group:
            settings[name] = float(group[name])
    if "betas" in group:
        settings["betas"] = tuple(float(beta) for beta in group["betas"])
    return settings


def _shown(value: object) -> str:
    return ", ".join(f"{number:.4g}" for number in (value if isinstance(value, tuple) else (value,)))


def _has_momentum(optimizer: Optimizer) -> bool:
    return any("momentum" in group or "betas" in group for group in optimizer.param_groups)


def _set_momentum(optimizer: Optimizer, value: float) -> None:
    own = [group for group in optimizer.param_groups if "momentum" in group]
    for group in own:
        group["momentum"] = value
    if own:
        return
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

"""Schedules of weight decay and momentum, beside whatever schedule the rates follow.

    value(t) = end + (start - end) * f(t / until),    f from 1 to 0: 1 - p (linear) or (1 + cos(pi p)) / 2 (cosine)

Saves: nothing by itself; recipes that raise weight decay (DINO) or warm momentum up (Muon) are a block of YAML
Costs: nothing
Source: Caron et al. (2021), https://arxiv.org/abs/2104.14294; momentum: https://kellerjordan.github.io/posts/muon
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.declaration import Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.optimizers.rates import nested_schedulers
from lit_efficient.optimizers.schedules import decay_factor, steps_of
from lit_efficient.technique import Technique


class OptimizerSchedule(Technique):
    """Set weight decay and momentum of each step, as the step's number alone decides.

    ``weight_decay`` is that of the groups with the largest; others keep their proportion to it, and those without
    (biases, norms) stay without. Momentum is ``momentum`` of the groups that have one, else the first of ``betas``.

    Args:
        weight_decay: From what to what, two numbers of at least 0; ``None`` leaves it alone.
        momentum: The same, of at least 0 and below 1.
        until: Step at which the end is reached, or a share of the run's steps; after it the end stays.
        shape: ``linear`` or ``cosine``.

    Raises:
        ConfigurationError: For an argument out of range, if there is nothing to set, or a run without an end.
        ConflictError: If a scheduler (``OneCycleLR``) moves the momentum, too, and for torchao's low-bit optimizers.
    """

    needs = ("weight_decay",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "recipes that schedule weight decay or momentum")}

    def __init__(
        self,
        weight_decay: Sequence[float] | None = None,
        momentum: Sequence[float] | None = None,
        until: int | float = 1.0,
        shape: Literal["linear", "cosine"] = "cosine",
    ) -> None:
        super().__init__()
        for name, value, below in (("weight_decay", weight_decay, None), ("momentum", momentum, 1.0)):
            if value is not None and (isinstance(value, str) or len(value) != 2):
                raise refusal("OptimizerSchedule", name, "two numbers, from what to what, or null", value)
            for number in value or ():
                check_number("OptimizerSchedule", name, number, least=0, below=below)
        if weight_decay is None and momentum is None:
            raise ConfigurationError("OptimizerSchedule: give weight_decay or momentum; both are null")
        check_choice("OptimizerSchedule", "shape", shape, ("linear", "cosine"))
        if not steps_of("OptimizerSchedule", "until", until, 2**62):
            raise refusal("OptimizerSchedule", "until", "above 0", until)
        self.weight_decay, self.momentum, self.until, self.shape = weight_decay, momentum, until, shape
        self._steps = 0
        self._run: list[Any] = []  # what bounds the run that the steps are of
        self._decays: list[list[float]] = []  # of each optimizer's groups, as a share of the largest

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._decays, self._run = [], []  # a checkpoint's come later

    def describe(self, module: nn.Module) -> Report:
        values = {"weight decay": self.weight_decay, "momentum": self.momentum}
        return Report(", ".join(f"{name} {v[0]:g} to {v[1]:g}" for name, v in values.items() if v is not None))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the run's steps, while others have not begun to change how much a step accumulates.

        Raises:
            ConfigurationError: If the run has no end.
        """
        super().on_fit_start(trainer, pl_module)
        run = [trainer.max_steps, trainer.max_epochs]
        if self._run == run:  # what was counted at the beginning stays: batches may become fewer and larger
            return
        total = trainer.estimated_stepping_batches if isinstance(self.until, float) else 0
        if not math.isfinite(total):
            raise ConfigurationError(
                f"OptimizerSchedule: until={self.until:g} is a share of a run that has no end: give a number of steps"
            )
        self._steps = max(1, steps_of("OptimizerSchedule", "until", self.until, int(total)))
        self._run = run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the groups.

        Raises:
            ConfigurationError: If no group has what is to be set.
            ConflictError: If a scheduler moves the momentum, too, or the step is compiled for each value.
        """
        if any(base.__module__.startswith("torchao.") for one in trainer.optimizers for base in type(one).__mro__):
            raise ConflictError(
                "OptimizerSchedule: torchao compiles its step again for each value of weight decay and betas: use "
                "LowBitOptimizer(backend='bitsandbytes'), or leave OptimizerSchedule out"
            )
        decays = [[float(group.get("weight_decay", 0.0)) for group in one.param_groups] for one in trainer.optimizers]
        largest = max(map(max, decays)) or 1.0
        if [len(groups) for groups in self._decays] != [len(groups) for groups in decays]:
            self._decays = [[decay / largest for decay in groups] for groups in decays]
        if self.weight_decay is not None and not any(map(any, self._decays)):
            raise ConfigurationError("OptimizerSchedule: no group of the optimizer has a weight_decay above 0 to set")
        if self.momentum is None:
            return
        if not any(_has_momentum(optimizer) for optimizer in trainer.optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise ConfigurationError(f"OptimizerSchedule: {kinds} has neither momentum nor betas to set")
        for scheduler in nested_schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
            if getattr(scheduler, "cycle_momentum", False):
                raise ConflictError(
                    f"OptimizerSchedule: {type(scheduler).__name__} moves the momentum, too: give it "
                    "cycle_momentum=False, or leave momentum out"
                )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the values of the step under way, before a backward pass in which some step."""
        left = decay_factor(self._progress(trainer, pl_module), self.shape)
        for optimizer, decays in zip(trainer.optimizers, self._decays, strict=True):
            for group, share in zip(optimizer.param_groups, decays, strict=True):
                if self.weight_decay is not None and share:
                    group["weight_decay"] = share * _between(self.weight_decay, left)
            if self.momentum is not None:
                _set_momentum(optimizer, _between(self.momentum, left))

    def _progress(self, trainer: Any, module: Any) -> float:
        """How much of the way to ``until`` is over. Of shares, where several optimizers may step for a batch by hand,
        the batches tell: the trainer counts each optimizer's steps, and batches alone when it says how many will come.
        """
        if module.automatic_optimization or not isinstance(self.until, float):
            return float(trainer.global_step / self._steps)
        batches = trainer.num_training_batches * max(0, trainer.max_epochs or 0)
        ends = [(trainer.fit_loop.total_batch_idx, batches), (trainer.global_step, trainer.max_steps)]
        return max(done / end for done, end in ends if end > 0) / self.until

    def state_dict(self) -> dict[str, Any]:
        """The proportions of the groups' weight decay, which may have become 0 since, and the length of the run."""
        return {"decays": self._decays, "steps": self._steps, "run": self._run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._decays, self._steps, self._run = (state_dict[name] for name in ("decays", "steps", "run"))


def _between(ends: Sequence[float], left: float) -> float:
    start, end = ends
    return end + (start - end) * left


def _has_momentum(optimizer: Optimizer) -> bool:
    return any("momentum" in group or "betas" in group for group in optimizer.param_groups)


def _set_momentum(optimizer: Optimizer, value: float) -> None:
    own = [group for group in optimizer.param_groups if "momentum" in group]
    for group in own:
        group["momentum"] = value
    for group in optimizer.param_groups if not own else ():
        if "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

"""Learning-rate schedules: factors on each group's rate as plain functions of the step, and the base of our classes."""

import inspect
import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.errors import check_number, refusal
from lit_efficient.mechanisms.trials.rate_range import set_rate

Shape = Literal["linear", "cosine", "sqrt"]
SHAPES = ("linear", "cosine", "sqrt")


def warmup_cosine(step: int, warmup: int, total: float) -> float:
    """Factor on the learning rate: linear up to 1 over ``warmup`` steps, then half a cosine to 0 at ``total``.

    Args:
        step: Optimizer step, from 0; the first one already has a factor above 0.
        warmup: Steps of warm-up.
        total: Steps of the run; infinity keeps the factor at 1 after the warm-up.
    """
    rise = warmup_factor(step, warmup)
    if math.isinf(total):
        return rise
    return rise * decay_factor((step - warmup) / max(1.0, total - warmup), "cosine")


def warmup_factor(step: int, warmup: int) -> float:
    """Linear up to 1 over ``warmup`` steps: that of step 0 is 1 / ``warmup``, and above 0."""
    return min(1.0, (step + 1) / max(1, warmup))


def decay_factor(progress: float, shape: Shape = "linear", final: float = 0.0) -> float:
    """From 1 at a progress of 0 (and before) to ``final`` at 1 (and after).

    Args:
        progress: Share of the decay that is over.
        shape: ``linear``; ``cosine``, half a period; ``sqrt``, one minus the square root of the progress.
        final: Where it ends.

    Example:
        >>> [decay_factor(p / 4) for p in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    progress = min(1.0, max(0.0, progress))
    fall = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "sqrt": 1 - progress**0.5}
    return final + (1 - final) * fall[shape]


def steps_of(owner: str, name: str, value: float, total: int) -> int:
    """A number of steps: itself, where it is a whole number, else that share of ``total``.

    Raises:
        ConfigurationError: Naming argument, range and value.
    """
    whole, share = type(value) is int and value >= 0, isinstance(value, float) and 0 <= value <= 1
    if not (whole or share):
        raise refusal(owner, name, "a whole number of steps of at least 0, or a share from 0.0 to 1.0 of all", value)
    return int(value) if whole else round(value * total)


class FactorLRScheduler(LRScheduler):
    """Base of schedules that multiply each group's rate by one function of the step.

    Its arguments win over those of a state that is loaded, so that a run may go on with another length. They are
    attributes of the same name.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """What the rates are multiplied by in a step, from 0."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the step of a state; where that was of other arguments, with the rates that these give there."""
        names = inspect.signature(type(self)).parameters.keys() - {"optimizer", "last_epoch"}
        own = {name: getattr(self, name) for name in names}
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in own})
        if any(name in state_dict and state_dict[name] != value for name, value in own.items()):
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                set_rate(group, rate)
            self._last_lr = self.get_lr()


class DecayLRScheduler(FactorLRScheduler):
    """Base of those that rise along a line and fall along one shape to the end of the run."""

    falls: Shape

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup: int | float, final: float, last_epoch: int = -1
    ) -> None:
        check_number(type(self).__name__, "total_steps", total_steps, least=1, whole=True)
        check_number(type(self).__name__, "final", final, least=0, most=1)
        steps_of(type(self).__name__, "warmup", warmup, total_steps)
        self.total_steps, self.warmup, self.final = total_steps, warmup, final
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        warmup = steps_of(type(self).__name__, "warmup", self.warmup, self.total_steps)
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        return warmup_factor(step, warmup) * decay_factor(progress, self.falls, self.final)

"""Learning-rate schedules: factors as functions of the step, and base classes of the schedulers."""

import inspect
import math
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.errors import ChecksTypes, check_number, refusal
from lit_efficient.mechanisms.trials.rate_range import set_rate

Shape = Literal["linear", "cosine", "sqrt"]


def warmup_cosine(step: int, warmup: int, total: float) -> float:
    """Return the factor of a linear warm-up that is followed by half a cosine to 0.

    Args:
        step: Optimizer step, from 0.
        warmup: Number of warm-up steps.
        total: Number of steps of the run. With infinity the factor stays 1 after the warm-up.
    """
    rise = warmup_factor(step, warmup)
    if math.isinf(total):
        return rise
    return rise * decay_factor((step - warmup) / max(1.0, total - warmup), "cosine")


def warmup_factor(step: int, warmup: int) -> float:
    """Return a factor that rises linearly from 1 / ``warmup`` in step 0 to 1, and is 1 afterwards."""
    return min(1.0, (step + 1) / max(1, warmup))


def decay_factor(progress: float, shape: Shape = "linear", final: float = 0.0) -> float:
    """Return a factor that falls from 1 at a progress of 0 (and before) to ``final`` at 1 (and after).

    Args:
        progress: Share of the decay that has passed.
        shape: ``linear``; ``cosine``, half a period; ``sqrt``, one minus the square root of the progress.
        final: Factor at the end.

    Example:
        >>> [decay_factor(p / 4) for p in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    progress = min(1.0, max(0.0, progress))
    fall = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "sqrt": 1 - progress**0.5}
    return final + (1 - final) * fall[shape]


def steps_of(owner: str, name: str, value: float, total: int) -> int:
    """Return an argument as a number of steps: an ``int`` unchanged, and a ``float`` as a share of ``total``.

    Raises:
        ConfigurationError: Naming owner, argument, range and value.
    """
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return round(value * total)
    raise refusal(owner, name, "a whole number of steps of at least 0, or a share from 0.0 to 1.0 of all", value)


class FactorLRScheduler(ChecksTypes, LRScheduler):
    """Base of schedulers that multiply the rate of each group by one function of the step.

    Subclasses keep their constructor arguments as attributes of the same name. When a state is loaded, the constructor
    arguments win over those in the state, so that a run can continue with another length.
    """

    def factor(self, step: int) -> float:
        """Return the factor on the rates in a step, from 0."""
        raise NotImplementedError

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step, and warn if something else has changed those of the step before."""
        # Not in the first step: techniques may have scaled the rates since the constructor set them.
        if self.last_epoch in (1, 2):
            self._warn_of_other_rates()
        super().step(epoch)

    def _warn_of_other_rates(self) -> None:
        used = [float(group["lr"]) for group in self.optimizer.param_groups]
        for rate, own in zip(used, self.get_last_lr()):
            if not math.isclose(rate, float(own), rel_tol=1e-5):
                rank_zero_warn(
                    f"{type(self).__name__}: the schedule has set the rate {float(own):.3g}, but the optimizer has "
                    f"{rate:.3g}: optimizer_step of the module, a callback or another scheduler sets it, too. Leave "
                    "out one of them"
                )
                return

    def get_lr(self) -> list[Any]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue at the step of a state. If its arguments differ, set the rates that the own arguments give there."""
        names = inspect.signature(type(self)).parameters.keys() - {"optimizer", "last_epoch"}
        own = {name: getattr(self, name) for name in names}
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in own})
        if any(name in state_dict and state_dict[name] != value for name, value in own.items()):
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                set_rate(group, rate)
            self._last_lr = self.get_lr()


class DecayLRScheduler(FactorLRScheduler):
    """Base of schedulers with a linear warm-up that is followed by a decay to the end of the run."""

    falls: Shape  # shape of the decay

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup: int | float = 0.01,
        final: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        owner = type(self).__name__
        check_number(owner, "total_steps", total_steps, least=1, whole=True)
        check_number(owner, "final", final, least=0, most=1)
        steps_of(owner, "warmup", warmup, total_steps)
        self.total_steps = total_steps
        self.warmup = warmup
        self.final = final
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        warmup = steps_of(type(self).__name__, "warmup", self.warmup, self.total_steps)
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        return warmup_factor(step, warmup) * decay_factor(progress, self.falls, self.final)

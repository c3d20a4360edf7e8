"""Linear warm-up, followed by a learning rate that falls with the inverse square root of the step.

The length of the run need not be known.

    factor(t) = min((t + 1) / warmup, sqrt(warmup / max(t, warmup)))       in step t, from 0

Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762
"""

from typing import ClassVar

from torch.optim import Optimizer

from lit_efficient.errors import check_number
from lit_efficient.optimizers.schedules import FactorLRScheduler, warmup_factor


class InverseSquareRoot(FactorLRScheduler):
    """Raise the rate of each group linearly to its full value, then lower it: to half after 4 times the warm-up.

    Args:
        optimizer: Optimizer whose rates are set.
        warmup: Steps of the warm-up, at least 1. It also sets how fast the rate falls.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "a rate that falls with the step, for runs without an end")
    }

    def __init__(self, optimizer: Optimizer, warmup: int = 1000, last_epoch: int = -1) -> None:
        check_number("InverseSquareRoot", "warmup", warmup, least=1, whole=True)
        self.warmup = warmup
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        return warmup_factor(step, self.warmup) * (self.warmup / max(step, self.warmup)) ** 0.5

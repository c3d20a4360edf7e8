"""Linear warm-up, followed by a constant learning rate. The length of the run need not be known.

factor(t) = min(1, (t + 1) / warmup)       in step t, from 0
"""

from typing import ClassVar

from torch.optim import Optimizer

from lit_efficient.errors import check_number
from lit_efficient.optimizers.schedules import FactorLRScheduler, warmup_factor


class WarmupConstant(FactorLRScheduler):
    """Raise the rate of each group linearly to its full value, and keep it there.

    Args:
        optimizer: Optimizer whose rates are set.
        warmup: Steps of the warm-up, at least 0.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "a rate that stays, after a warm-up")}

    def __init__(self, optimizer: Optimizer, warmup: int = 100, last_epoch: int = -1) -> None:
        check_number("WarmupConstant", "warmup", warmup, least=0, whole=True)
        self.warmup = warmup
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        return warmup_factor(step, self.warmup)

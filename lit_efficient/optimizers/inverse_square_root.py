"""A rate that falls with the square root of the step, after a linear warm-up: it needs no end of the run.

    factor(t) = min((t + 1) / warmup, sqrt(warmup / max(t, warmup)))       in step t, from 0

Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762
"""

from typing import ClassVar

from torch.optim import Optimizer

from lit_efficient.errors import check_number
from lit_efficient.optimizers.schedules import FactorLRScheduler, warmup_factor


class InverseSquareRoot(FactorLRScheduler):
    """Raise each group's rate from near 0 to its own, and let it fall to half when the warm-up has passed four times.

    Args:
        optimizer: Whose rates it sets.
        warmup: Steps of warm-up, 1 or more; how fast it falls depends on it, too.
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

"""Half a cosine from the rate to its end, after a linear warm-up.

    factor(t) = (t + 1) / warmup, then final + (1 - final) * (1 + cos(pi p)) / 2,       in step t, from 0
    p = (t - warmup) / (total_steps - warmup)

Source: Loshchilov and Hutter (2017), https://arxiv.org/abs/1608.03983, without restarts
"""

from typing import ClassVar

from torch.optim import Optimizer

from lit_efficient.optimizers.schedules import DecayLRScheduler


class WarmupCosine(DecayLRScheduler):
    """Raise each group's rate from near 0 to its own, then let it fall along half a cosine.

    Args:
        optimizer: Whose rates it sets.
        total_steps: Of the run, 1 or more; the command line fills it in.
        warmup: Steps of warm-up, or a share of all.
        final: What is left of the rates at the end, and after it, from 0 to 1.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    falls = "cosine"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "half a cosine to the run's end")}

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup: int | float = 0.01,
        final: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup, final, last_epoch)

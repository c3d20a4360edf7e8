"""Linear warm-up, followed by half a cosine from the full learning rate to the final one.

    factor(t) = (t + 1) / warmup, then final + (1 - final) * (1 + cos(pi p)) / 2,       in step t, from 0
    p = (t - warmup) / (total_steps - warmup)

Source: Loshchilov and Hutter (2017), https://arxiv.org/abs/1608.03983, without restarts
"""

from typing import ClassVar

from lit_efficient.optimizers.schedules import DecayLRScheduler


class WarmupCosine(DecayLRScheduler):
    """Raise the rate of each group linearly to its full value, then lower it along half a cosine.

    Args:
        optimizer: Optimizer whose rates are set.
        total_steps: Steps of the run, at least 1. The command line fills it in.
        warmup: Steps of the warm-up, or a share of all steps.
        final: Share of the rates that is left at the end and afterwards, from 0 to 1.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    falls = "cosine"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "half a cosine to the run's end")}

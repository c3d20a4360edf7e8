"""Linear warm-up, followed by a straight line from the full learning rate to the final one.

    factor(t) = (t + 1) / warmup, then final + (1 - final) * (1 - p),       in step t, from 0
    p = (t - warmup) / (total_steps - warmup)

Most fine-tuning recipes use this schedule.
"""

from typing import ClassVar

from lit_efficient.optimizers.schedules import DecayLRScheduler


class WarmupLinear(DecayLRScheduler):
    """Raise the rate of each group linearly to its full value, then lower it along a straight line.

    Args:
        optimizer: Optimizer whose rates are set.
        total_steps: Steps of the run, at least 1. The command line fills it in.
        warmup: Steps of the warm-up, or a share of all steps.
        final: Share of the rates that is left at the end and afterwards, from 0 to 1.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    falls = "linear"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "a straight line to the run's end")}

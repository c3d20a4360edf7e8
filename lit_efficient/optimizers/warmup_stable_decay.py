"""Warm-up, constant learning rate and a short cool-down, which may begin at any checkpoint of the constant part (WSD).

    factor(t) = (t + 1) / warmup, then 1, then final + (1 - final) * f(p),    p = (t - total_steps + decay) / decay
    f(p) = 1 - p (linear), (1 + cos(pi p)) / 2 (cosine) or 1 - sqrt(p) (sqrt)

One long run at a constant rate can be turned into finished models of several lengths. Each costs only its cool-down:

    fit -c CONFIG --ckpt_path runs/x/step=8000.ckpt --trainer.max_steps 10000     (with decay: 2000)
"""

from typing import ClassVar

from torch.optim import Optimizer

from lit_efficient.errors import check_number, refusal
from lit_efficient.optimizers.schedules import FactorLRScheduler, Shape, decay_factor, steps_of, warmup_factor


class WarmupStableDecay(FactorLRScheduler):
    """Raise the rate of each group linearly to its full value, keep it, and lower it in the last steps of the run.

    Source: Hu et al. (2024), https://arxiv.org/abs/2404.06395; shapes: Hägele et al. (2024),
    https://arxiv.org/abs/2405.18392

    Args:
        optimizer: Optimizer whose rates are set.
        total_steps: Steps of the run, at least 1. The command line fills it in. A run that resumes from a checkpoint
            uses this value, not the one in the checkpoint.
        warmup: Steps of the warm-up, or a share of all steps.
        decay: Steps of the cool-down, or a share of all steps. ``warmup`` and ``decay`` are at most all steps together.
        shape: Shape of the cool-down: ``linear``, ``cosine`` or ``sqrt``.
        final: Share of the rates that is left at the end and afterwards, from 0 to 1.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "a constant rate, and a cool-down from any checkpoint")
    }

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup: int | float = 0.01,
        decay: int | float = 0.2,
        shape: Shape = "linear",
        final: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        who = "WarmupStableDecay"
        check_number(who, "total_steps", total_steps, least=1, whole=True)
        check_number(who, "final", final, least=0, most=1)
        used = steps_of(who, "warmup", warmup, total_steps) + steps_of(who, "decay", decay, total_steps)
        if used > total_steps:
            raise refusal(who, "decay", f"at most the {total_steps} steps of the run, minus those of warmup", decay)
        self.total_steps = total_steps
        self.warmup = warmup
        self.decay = decay
        self.shape = shape
        self.final = final
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        who = "WarmupStableDecay"
        decay = steps_of(who, "decay", self.decay, self.total_steps)
        progress = (step - self.total_steps + decay) / decay if decay else 0.0
        warmup = steps_of(who, "warmup", self.warmup, self.total_steps)
        return warmup_factor(step, warmup) * decay_factor(progress, self.shape, self.final)

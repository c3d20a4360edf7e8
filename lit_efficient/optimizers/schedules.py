"""Learning-rate schedules as plain functions of the step, for ``torch.optim.lr_scheduler.LambdaLR``."""

import math


def warmup_cosine(step: int, warmup: int, total: float) -> float:
    """Factor on the learning rate: linear up to 1 over ``warmup`` steps, then half a cosine to 0 at ``total``.

    Args:
        step: Optimizer step, from 0; the first one already has a factor above 0.
        warmup: Steps of warm-up.
        total: Steps of the run; infinity keeps the factor at 1 after the warm-up.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    if math.isinf(total):
        return rise
    progress = min(1.0, max(0.0, (step - warmup) / max(1.0, total - warmup)))
    return rise * 0.5 * (1.0 + math.cos(math.pi * progress))

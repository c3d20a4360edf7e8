"""From noise to data: the deterministic sampler and classifier-free guidance.

    x_s = alpha(s) x0 + sigma(s) eps,   with (x0, eps) from the prediction at t > s        (DDIM, eta = 0)
    guided = without + w (with - without)                                                  (w = 1: no guidance)

For the flow schedule a DDIM step is exactly Euler's step of the flow's equation, so one formula serves all processes.

Costs: one network evaluation a step, two with guidance.
Source: Song et al. (2020), https://arxiv.org/abs/2010.02502; Ho and Salimans (2022), https://arxiv.org/abs/2207.12598.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lit_efficient.losses.diffusion import Prediction, Schedule, alpha_sigma, to_x0_eps

# With `eps` the data is (x - sigma eps) / alpha: starting at alpha = 0 is 0 / 0, and just below it the network's error
# is multiplied by hundreds. 0.98 is alpha 0.02 to 0.03, where pure noise is still what the network saw in training.
_FIRST_EPS_TIME = 0.98


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of two predictions of one shape; ``scale`` 1 is the conditional, 0 the unconditional."""
    return torch.lerp(unconditional, conditional, scale)


def sampling_times(steps: int, prediction: Prediction) -> Tensor:
    """``steps + 1`` times from noise to data, evenly spaced, [steps + 1] float32 on the CPU."""
    return torch.linspace(_FIRST_EPS_TIME if prediction == "eps" else 1.0, 0.0, steps + 1)


def ddim_sample(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    times: Tensor,
    schedule: Schedule,
    prediction: Prediction,
) -> Tensor:
    """Integrate from noise to data.

    Args:
        predict: The network: noisy data [B, ...] and times [B] to a prediction [B, ...].
        noise: Standard normal, [B, ...].
        times: Decreasing times in [0, 1], [steps + 1]; see ``sampling_times``.
        schedule: The process that the network was trained on.
        prediction: What it predicts.

    Returns:
        Data, [B, ...].
    """
    x = noise
    for now, then in pairwise(times):
        t = now.to(x.device).expand(x.shape[0])
        x0, eps = to_x0_eps(predict(x, t).to(x.dtype), x, t, schedule, prediction)
        alpha, sigma = alpha_sigma(then, schedule)
        x = alpha.item() * x0 + sigma.item() * eps
    return x

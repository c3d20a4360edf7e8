"""Consistency models: a network that gives the data of each point of a path of the teacher.

    f(x, t) = c_skip(t) x + c_out(t) x0(x, t),   c_skip = d^2 / (s^2 + d^2),  c_out = s / sqrt(s^2 + d^2),  d = 0.5
    distillation   loss = |f(x_t, t) - f'(x_s, s)|,   x_s: one step of the teacher from x_t to s = t - 1 / 50
    sampling       x0 = f(x_t, t);   x_s = alpha(s) x0 + sigma(s) noise

s is 10 times the network's timestep in 0 to 1000. f at time 0 is therefore x itself, and f at all other times is almost
the prediction x0. Times, sampler and constants are those of diffusers' ``LCMScheduler`` with its defaults.

Costs: of the loss, two evaluations of the teacher (with guidance) and one of f' without gradients.
Source: Song et al. (2023), https://arxiv.org/abs/2303.01469; Luo et al. (2023), https://arxiv.org/abs/2310.04378.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_efficient.losses.diffusion import Prediction, add_noise, per_sample, to_x0_eps
from lit_efficient.losses.noise_process import DiffusionProcess

GRID = 50  # times of distillation, of which sampling takes a part
_SIGMA_DATA = 0.5
_SCALE = 10.0


def boundary_scalings(t: Tensor, process: DiffusionProcess) -> tuple[Tensor, Tensor]:
    """Return c_skip and c_out at times ``t`` in [0, 1], each of the shape of ``t``."""
    scaled = _SCALE * process.timestep(t)
    norm = scaled.square() + _SIGMA_DATA**2
    return _SIGMA_DATA**2 / norm, scaled / norm.sqrt()


def consistency_output(
    output: Tensor, x: Tensor, t: Tensor, process: DiffusionProcess, prediction: Prediction
) -> Tensor:
    """Return f(x, t), [B, ...], from the prediction of a network.

    Args:
        output: Prediction of the network, [B, ...].
        x: Noisy data that the network has seen, [B, ...].
        t: Times, [B].
        process: The process.
        prediction: Target that ``output`` predicts.
    """
    x0, _ = to_x0_eps(output, x, t, process, prediction)
    skip, out = (per_sample(factor, x) for factor in boundary_scalings(t, process))
    return skip * x + out * x0


def consistency_times(steps: int) -> Tensor:
    """Return the times of ``steps`` steps from noise to data, [steps] float32, a part of the grid of distillation."""
    index = (torch.arange(steps, dtype=torch.float64) * (GRID / steps)).floor()
    return ((GRID - index) / GRID).float()


def ddim_step(
    output: Tensor, x: Tensor, t: Tensor, then: Tensor, process: DiffusionProcess, prediction: Prediction
) -> Tensor:
    """Return the noisy data at times ``then`` [B] after one step of DDIM from times ``t`` [B], [B, ...]."""
    x0, eps = to_x0_eps(output, x, t, process, prediction)
    return add_noise(x0, eps, then, process)


def huber_loss(found: Tensor, target: Tensor, scale: float) -> Tensor:
    """Return the mean of ``sqrt((found - target)^2 + scale^2) - scale`` of each row, [B]. 0: the squared error."""
    difference = (found - target).flatten(1)
    if scale == 0:
        return difference.square().mean(dim=1)
    return ((difference.square() + scale**2).sqrt() - scale).mean(dim=1)


def consistency_sample(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    process: DiffusionProcess,
    prediction: Prediction,
    renoise: Callable[[], Tensor],
) -> Tensor:
    """Sample with a consistency model, as ``LCMScheduler`` does, and return the data [B, ...].

    Args:
        predict: Network: noisy data [B, ...] and times [B] to a prediction [B, ...].
        noise: Standard normal noise, [B, ...].
        steps: Number of steps, at most 50.
        process: Process that the network was trained on.
        prediction: Target that the network predicts.
        renoise: Draws further noise, [B, ...]. It is called before each step but the first.
    """
    x = noise
    x0 = noise
    for i, time in enumerate(consistency_times(steps).to(noise.device)):
        t = time.expand(len(noise))
        if i:
            x = add_noise(x0, renoise(), t, process)
        x0 = consistency_output(predict(x, t).to(x.dtype), x, t, process, prediction)
    return x0


def distribution_matching_gradient(x0: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """Return the gradient of DMD2's loss with respect to generated data, without gradient: [B, ...].

    Args:
        x0: Generated data, [B, ...].
        real: Prediction of the clean data by the teacher, from the noisy generated data, [B, ...].
        fake: The same prediction by a network that is trained on generated data, [B, ...].

    Source: Yin et al. (2024), https://arxiv.org/abs/2405.14867.
    """
    x0, real, fake = (value.detach() for value in (x0, real, fake))
    dims = tuple(range(1, x0.dim()))
    gradient = (fake - real) / (x0 - real).abs().mean(dim=dims, keepdim=True)
    return gradient.nan_to_num()


def distribution_matching_loss(x0: Tensor, gradient: Tensor) -> Tensor:
    """Return the loss of each row whose gradient with respect to ``x0`` is ``gradient`` over its elements, [B]."""
    target = (x0 - gradient).detach()
    return 0.5 * (x0 - target).square().flatten(1).mean(dim=1)

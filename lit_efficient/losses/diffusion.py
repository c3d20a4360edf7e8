"""The diffusion process: noise schedules, what a network may be asked to predict, and how the answers convert.

    x_t = alpha(t) x0 + sigma(t) eps,    t in [0, 1], from data to noise
    flow:   alpha = 1 - t,            sigma = t              (Lipman et al. 2022, https://arxiv.org/abs/2210.02747)
    cosine: alpha = cos(pi t / 2),    sigma = sin(pi t / 2)  (Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672)

    targets: eps;  x0;  flow = eps - x0;  v = alpha eps - sigma x0 (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512)

Every target gives the same x0 and eps under every schedule. At t = 1 there is no signal (alpha = 0) and at t = 0 no
noise: training draws t within ``T_RANGE``, so that log-SNRs are finite and every conversion is defined.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError

Schedule = Literal["flow", "cosine"]
Prediction = Literal["flow", "eps", "v", "x0"]
TimestepSampling = Literal["uniform", "logit_normal"]

T_RANGE = (1e-3, 1.0 - 1e-3)


def check_choice(owner: str, name: str, value: str, choices: object) -> None:
    """Raise ConfigurationError unless ``value`` is one of the strings of the Literal ``choices``."""
    if value not in get_args(choices):
        raise ConfigurationError(f"{owner}: {name} must be one of {', '.join(get_args(choices))}, not {value!r}.")


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ..., 1] with as many dimensions as ``like``."""
    return value.reshape(-1, *[1] * (like.dim() - 1))


def alpha_sigma(t: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Factors of signal and noise at times ``t`` (any shape, in [0, 1]); the same shape each."""
    if schedule == "flow":
        return 1.0 - t, t
    check_choice("alpha_sigma", "schedule", schedule, Schedule)
    return torch.cos(t * (math.pi / 2)), torch.sin(t * (math.pi / 2))


def log_snr(t: Tensor, schedule: Schedule) -> Tensor:
    """``log(alpha^2 / sigma^2)`` at times ``t``; +inf at 0, and at 1 -inf (or its nearest float)."""
    alpha, sigma = alpha_sigma(t, schedule)
    return 2.0 * (alpha.log() - sigma.log())


def add_noise(x0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """``alpha x0 + sigma eps``: data and noise [B, ...] at times [B] to noisy data [B, ...]."""
    alpha, sigma = (per_sample(a, x0) for a in alpha_sigma(t, schedule))
    return alpha * x0 + sigma * eps


def target(x0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, prediction: Prediction) -> Tensor:
    """What the network is asked for: [B, ...] from data and noise [B, ...] at times [B]."""
    alpha, sigma = (per_sample(a, x0) for a in alpha_sigma(t, schedule))
    match prediction:
        case "eps":
            return eps
        case "x0":
            return x0
        case "v":
            return alpha * eps - sigma * x0
        case "flow":
            return eps - x0
    check_choice("target", "prediction", prediction, Prediction)


def to_x0_eps(
    output: Tensor, x_t: Tensor, t: Tensor, schedule: Schedule, prediction: Prediction
) -> tuple[Tensor, Tensor]:
    """Data and noise that a prediction stands for.

    Each is the solution of two linear equations in (x0, eps): the process and the target's definition.

    Args:
        output: The network's prediction, [B, ...].
        x_t: The noisy data it was made from, [B, ...].
        t: Times, [B]. For ``eps`` below 1, for ``x0`` above 0: there the equations do not determine the rest.
        schedule: The process.
        prediction: What ``output`` is.

    Returns:
        x0 and eps, [B, ...] each.
    """
    alpha, sigma = (per_sample(a, x_t) for a in alpha_sigma(t, schedule))
    match prediction:
        case "eps":
            return (x_t - sigma * output) / alpha, output
        case "x0":
            return output, (x_t - alpha * output) / sigma
        case "v":
            norm = alpha.square() + sigma.square()
            return (alpha * x_t - sigma * output) / norm, (sigma * x_t + alpha * output) / norm
        case "flow":
            norm = alpha + sigma
            return (x_t - sigma * output) / norm, (x_t + alpha * output) / norm
    check_choice("to_x0_eps", "prediction", prediction, Prediction)


def sample_timesteps(
    count: int,
    sampling: TimestepSampling,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Random training times, [count] float32 within ``T_RANGE``.

    ``logit_normal`` is sigmoid(normal), which spends more of the training at the middle, where the problem is hardest
    (Esser et al. 2024, https://arxiv.org/abs/2403.03206).

    Args:
        count: How many.
        sampling: The distribution.
        generator: Where the draws come from; None is torch's global generator.
        device: Where the result lies; without a generator the draws are made there.
    """
    source = device if generator is None else generator.device
    if sampling == "uniform":
        t = torch.rand(count, generator=generator, device=source)
    else:
        check_choice("sample_timesteps", "sampling", sampling, TimestepSampling)
        t = torch.randn(count, generator=generator, device=source).sigmoid()
    return t.clamp(*T_RANGE).to(device)

"""Prediction targets of diffusion networks, and conversions between them.

    eps;   x0;   flow = eps - x0;   v = alpha eps - sigma x0    (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512)
    edm = (s x0 / d - d eps) / sqrt(s^2 + d^2),   s = sigma / alpha,  d = sigma_data
                                                                (Karras et al. 2022, https://arxiv.org/abs/2206.00364)

Every target determines both x0 and eps under every process of :mod:`lit_efficient.losses.noise_process`, with two
exceptions: eps does not determine x0 at pure noise, and x0 does not determine eps at pure data.

``edm`` is the raw network F of the paper: the denoiser is D = c_skip x + c_out F. The paper's loss lambda |D - x0|^2
with lambda = (s^2 + d^2) / (s d)^2 = 1 / c_out^2 equals the unweighted |F - edm|^2. With d = 1, edm is -v of the
variance-preserving process of the same signal-to-noise ratio.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, refusal
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule, as_process
from lit_efficient.surgery import moved

Prediction = Literal["flow", "eps", "v", "x0", "edm"]


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """Reshape [B] to [B, 1, ..., 1] with as many dimensions as ``like``. Return maps [B, 1, H, W] unchanged."""
    if value.dim() == like.dim():
        return value
    return value.reshape(-1, *[1] * (like.dim() - 1))


def alpha_sigma(t: Tensor, process: Schedule | DiffusionProcess) -> tuple[Tensor, Tensor]:
    """Return the factors of signal and noise at times ``t`` in [0, 1], each of the shape of ``t``."""
    return as_process(process).alpha_sigma(t)


def log_snr(t: Tensor, process: Schedule | DiffusionProcess) -> Tensor:
    """Return ``log(alpha^2 / sigma^2)`` at times ``t``: +inf at 0, and -inf where there is no signal."""
    return as_process(process).log_snr(t)


def add_noise(x0: Tensor, eps: Tensor, t: Tensor, process: Schedule | DiffusionProcess) -> Tensor:
    """Return noisy data ``alpha x0 + sigma eps``, [B, ...], from data and noise [B, ...].

    Times ``t`` are [B], or [B, 1, H, W] for one time at each position.
    """
    alpha, sigma = (per_sample(a, x0) for a in alpha_sigma(t, process))
    return alpha * x0 + sigma * eps


def draw_noise(
    x0: Tensor, process: DiffusionProcess, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw noise for a training step.

    Args:
        x0: Data, [B, C, ...].
        process: Process, which sets the strengths of offset noise and input perturbation.
        generator: Random generator. ``None`` takes torch's global generator.

    Returns:
        The noise that the network has to predict, and the noise in the network's input, both of the shape of ``x0``.
        They are the same tensor without input perturbation.
    """

    def normal(*shape: int) -> Tensor:
        device = x0.device if generator is None else generator.device
        return moved(torch.randn(shape, generator=generator, device=device, dtype=x0.dtype), x0.device)

    eps = normal(*x0.shape)
    if process.offset_noise:
        eps = eps + process.offset_noise * normal(*x0.shape[:2], *[1] * (x0.dim() - 2))
    if not process.input_perturbation:
        return eps, eps
    return eps, eps + process.input_perturbation * normal(*x0.shape)


def target(x0: Tensor, eps: Tensor, t: Tensor, process: Schedule | DiffusionProcess, prediction: Prediction) -> Tensor:
    """Return the training target of the network, [B, ...], from data and noise [B, ...].

    Times ``t`` are [B], or [B, 1, H, W] for one time at each position.
    """
    process = as_process(process)
    alpha, sigma = (per_sample(a, x0) for a in process.alpha_sigma(t))
    match prediction:
        case "eps":
            return eps
        case "x0":
            return x0
        case "v":
            return alpha * eps - sigma * x0
        case "flow":
            return eps - x0
        case "edm":
            d = process.sigma_data
            return (sigma / d * x0 - d * alpha * eps) / (sigma.square() + (alpha * d).square()).sqrt()
    check_choice("target", "prediction", prediction, get_args(Prediction))


def to_x0_eps(
    output: Tensor, x_t: Tensor, t: Tensor, process: Schedule | DiffusionProcess, prediction: Prediction
) -> tuple[Tensor, Tensor]:
    """Convert a prediction to data x0 and noise eps, [B, ...] each.

    They solve two linear equations: x_t = alpha x0 + sigma eps, and the definition of the target.

    Args:
        output: Prediction of the network, [B, ...].
        x_t: Noisy data that the network has seen, [B, ...].
        t: Times, [B]. ``eps`` needs times with signal, and ``x0`` needs times with noise. Otherwise the result is not
            finite.
        process: The process.
        prediction: Target that ``output`` predicts.
    """
    process = as_process(process)
    alpha, sigma = (per_sample(a, x_t) for a in process.alpha_sigma(t))
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
        case "edm":
            d = process.sigma_data
            norm = sigma.square() + (alpha * d).square()
            x0 = alpha * d**2 / norm * x_t + sigma * d / norm.sqrt() * output
            return x0, sigma / norm * x_t - alpha * d / norm.sqrt() * output
    check_choice("to_x0_eps", "prediction", prediction, get_args(Prediction))


def convert(
    output: Tensor,
    x_t: Tensor,
    t: Tensor,
    process: Schedule | DiffusionProcess,
    prediction: Prediction,
    wanted: Prediction,
) -> Tensor:
    """Convert a prediction of one target to a prediction of the target ``wanted``. Arguments as in `to_x0_eps`."""
    if prediction == wanted:
        return output
    x0, eps = to_x0_eps(output, x_t, t, process, prediction)
    return target(x0, eps, t, process, wanted)


def check_prediction(owner: str, prediction: Prediction, process: DiffusionProcess) -> None:
    """Raise ConfigurationError for a target that does not work with the process. ``owner`` begins the message."""
    check_choice(owner, "prediction", prediction, get_args(Prediction))
    if prediction == "eps" and process.zero_terminal_snr:
        allowed = "v, flow, x0 or edm with zero_terminal_snr (the noise in pure noise does not determine the data)"
        raise refusal(owner, "prediction", allowed, prediction)

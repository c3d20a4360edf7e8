"""What a diffusion network may be asked to predict, and how the answers convert.

    eps;   x0;   flow = eps - x0;   v = alpha eps - sigma x0    (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512)
    edm = (s x0 / d - d eps) / sqrt(s^2 + d^2),   s = sigma / alpha,  d = sigma_data
                                                                (Karras et al. 2022, https://arxiv.org/abs/2206.00364)

Every target gives the same x0 and eps under every process of :mod:`lit_efficient.losses.noise_process`, wherever the
process determines them: eps says nothing of x0 where there is no signal, x0 nothing of eps where there is no noise.

``edm`` is the raw network F of the paper: D = c_skip x + c_out F denoises, and the paper's loss lambda |D - x0|^2 with
lambda = (s^2 + d^2) / (s d)^2 = 1 / c_out^2 is exactly the unweighted |F - edm|^2. With d = 1 it is -v of the
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
    """[B] -> [B, 1, ..., 1] with as many dimensions as ``like``."""
    return value.reshape(-1, *[1] * (like.dim() - 1))


def alpha_sigma(t: Tensor, process: Schedule | DiffusionProcess) -> tuple[Tensor, Tensor]:
    """Factors of signal and noise at times ``t`` (any shape, in [0, 1]); the same shape each."""
    return as_process(process).alpha_sigma(t)


def log_snr(t: Tensor, process: Schedule | DiffusionProcess) -> Tensor:
    """``log(alpha^2 / sigma^2)`` at times ``t``; +inf at 0, and -inf where there is no signal."""
    return as_process(process).log_snr(t)


def add_noise(x0: Tensor, eps: Tensor, t: Tensor, process: Schedule | DiffusionProcess) -> Tensor:
    """``alpha x0 + sigma eps``: data and noise [B, ...] at times [B] to noisy data [B, ...]."""
    alpha, sigma = (per_sample(a, x0) for a in alpha_sigma(t, process))
    return alpha * x0 + sigma * eps


def draw_noise(
    x0: Tensor, process: DiffusionProcess, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The noise that the network predicts and the one that it sees, as ``x0``: the same unless the input is perturbed.

    Args:
        x0: Data, [B, C, ...].
        process: Gives the strengths of offset noise and input perturbation.
        generator: Where the draws come from; None is torch's global generator.
    """

    def normal(*shape: int) -> Tensor:
        device = x0.device if generator is None else generator.device
        return moved(torch.randn(shape, generator=generator, device=device, dtype=x0.dtype), x0.device)

    eps = normal(*x0.shape)
    if process.offset_noise:
        eps = eps + process.offset_noise * normal(*x0.shape[:2], *[1] * (x0.dim() - 2))
    seen = eps + process.input_perturbation * normal(*x0.shape) if process.input_perturbation else eps
    return eps, seen


def target(x0: Tensor, eps: Tensor, t: Tensor, process: Schedule | DiffusionProcess, prediction: Prediction) -> Tensor:
    """What the network is asked for: [B, ...] from data and noise [B, ...] at times [B]."""
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
    """Data x0 and noise eps that a prediction stands for, [B, ...] each.

    Each is the solution of two linear equations in (x0, eps): the process and the target's definition.

    Args:
        output: The network's prediction, [B, ...].
        x_t: The noisy data it was made from, [B, ...].
        t: Times, [B]. For ``eps`` where there is signal, for ``x0`` where there is noise: elsewhere the equations do
            not determine the rest.
        process: The process.
        prediction: What ``output`` is.
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
    """A prediction as another target: what the network would have said, had it been asked for ``wanted``."""
    if prediction == wanted:
        return output
    x0, eps = to_x0_eps(output, x_t, t, process, prediction)
    return target(x0, eps, t, process, wanted)


def check_prediction(owner: str, prediction: Prediction, process: DiffusionProcess) -> None:
    """Raise ConfigurationError for a target that the process cannot be trained with or sampled from."""
    check_choice(owner, "prediction", prediction, get_args(Prediction))
    if prediction == "eps" and process.zero_terminal_snr:
        allowed = "v, flow, x0 or edm with zero_terminal_snr (the noise in pure noise says nothing of the data)"
        raise refusal(owner, "prediction", allowed, prediction)

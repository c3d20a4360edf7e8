"""Min-SNR weighting: one weight for the clean sample, converted to whatever the network predicts.

    lambda = log SNR = log(alpha^2 / sigma^2),    w_x0 = min(SNR, gamma)

A squared error in another target T weighs the error in x0 by ``(dT/dx0)^2``, so ``w_T = w_x0 / (dT/dx0)^2``:

    x0    1                         min(SNR, gamma)
    eps   SNR                       min(SNR, gamma) / SNR
    v     SNR + 1                   min(SNR, gamma) / (SNR + 1)
    flow  1 / sigma^2               min(SNR, gamma) sigma^2,    sigma = 1 / (1 + sqrt(SNR))  (alpha = 1 - sigma)

Source: Hang et al. (2023), https://arxiv.org/abs/2303.09556; v: Salimans & Ho (2022), https://arxiv.org/abs/2202.00512.
"""

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError

PREDICTIONS = ("eps", "v", "x0", "flow")


def min_snr_weight(log_snr: Tensor, gamma: float = 5.0, prediction: str = "eps", zero_snr: str = "unit") -> Tensor:
    """Weights for the squared errors of a diffusion model at the given noise levels.

    Args:
        log_snr: ``log(alpha^2 / sigma^2)`` of each sample, any shape; ``-inf`` is pure noise, ``+inf`` is clean.
        gamma: Where the weight of the clean sample is capped, above 0; 5 in the paper.
        prediction: What the error is measured in: ``eps``, ``v``, ``x0`` or ``flow``.
        zero_snr: What to do at zero SNR, where the weight of ``eps`` is 0/0 and that of ``v`` is 0, so that the step
            would never be trained: ``unit`` gives it the weight 1, ``error`` raises.

    Returns:
        Weights of the shape of ``log_snr``, float32 at least; 0 for ``flow`` at infinite SNR, where sigma is 0.

    Raises:
        ConfigurationError: For an argument out of range, or zero SNR with ``zero_snr="error"``.
    """
    check_snr_arguments(gamma, prediction, zero_snr)
    log_snr = log_snr.to(torch.promote_types(log_snr.dtype, torch.float32))
    log_cap = torch.tensor(gamma, dtype=log_snr.dtype, device=log_snr.device).log()
    capped = torch.minimum(log_snr, log_cap)  # in logarithms: exp(log_snr) may overflow where the weight does not
    if prediction == "x0":
        return capped.exp()
    if prediction == "flow":
        return (capped - 2 * torch.nn.functional.softplus(log_snr / 2)).exp()
    log_scale = torch.nn.functional.softplus(log_snr) if prediction == "v" else log_snr
    return _at_zero_snr((capped - log_scale).exp(), log_snr, zero_snr)


def _at_zero_snr(weight: Tensor, log_snr: Tensor, policy: str) -> Tensor:
    zero = torch.isneginf(log_snr)
    if policy == "error":
        if bool(zero.any()):
            raise ConfigurationError(
                "min_snr_weight: zero_snr='error', and the batch has samples at zero SNR (a zero-terminal schedule): "
                "use zero_snr='unit', or a schedule that ends above zero"
            )
        return weight
    return torch.where(zero, torch.ones_like(weight), weight)


def check_snr_arguments(gamma: float, prediction: str, zero_snr: str) -> None:
    """Raise :class:`ConfigurationError` for an argument out of range."""
    if not gamma > 0:
        raise ConfigurationError(f"min_snr_weight: gamma must be above 0, got {gamma}")
    if prediction not in PREDICTIONS:
        raise ConfigurationError(
            f"min_snr_weight: prediction must be one of {', '.join(PREDICTIONS)}; got {prediction!r}"
        )
    if zero_snr not in ("unit", "error"):
        raise ConfigurationError(f"min_snr_weight: zero_snr must be unit or error, got {zero_snr!r}")

"""Loss weights that depend on the signal-to-noise ratio (SNR), converted to the network's prediction target.

    lambda = log SNR = log(alpha^2 / sigma^2)

    rule           w_x0                             as its paper writes it
    min_snr        min(SNR, gamma)                  gamma = 5
    soft_min_snr   SNR gamma / (SNR + gamma)        1 / (sigma^2 / alpha^2 + 1 / gamma), gamma = 4
    p2             SNR / (1 + SNR)^gamma            1 / (1 + SNR)^gamma for eps, gamma = 1
    debiased       sqrt(SNR)                        1 / sqrt(SNR) for eps
    truncated      max(SNR, 1)                      max(SNR, 1) for x0
    sigma_sqrt     1 / s^4                          1 / s^2 for flow,    s = 1 / (1 + sqrt(SNR))
    cosmap         2 / (pi s^2 (1 - 2 s + 2 s^2))   2 / (pi (1 - 2 s + 2 s^2)) for flow

The weights are defined for the squared error of x0. A squared error of another target T equals that of x0 times
``(dT/dx0)^2``, so its weight is ``w_T = w_x0 / (dT/dx0)^2``:

    target   (dT/dx0)^2     min_snr, for example
    x0       1              min(SNR, gamma)
    eps      SNR            min(SNR, gamma) / SNR
    v        SNR + 1        min(SNR, gamma) / (SNR + 1)
    flow     1 / sigma^2    min((1 - t)^2, gamma t^2),    t = sigma = 1 / (1 + sqrt(SNR)), alpha = 1 - t
    edm      SNR + 1 / d^2  min(SNR, gamma) / (SNR + 1 / d^2),    d = sigma_data

Sources: Min-SNR: Hang et al. (2023), https://arxiv.org/abs/2303.09556; soft Min-SNR: Crowson et al. (2024),
https://arxiv.org/abs/2401.11605; P2: Choi et al. (2022), https://arxiv.org/abs/2204.00227; debiased: Yu et al. (2023),
https://arxiv.org/abs/2310.08442; truncated, and v: Salimans & Ho (2022), https://arxiv.org/abs/2202.00512; cosmap:
Esser et al. (2024), https://arxiv.org/abs/2403.03206; sigma_sqrt: so called in diffusers' training of their models.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal

PREDICTIONS = ("eps", "v", "x0", "flow", "edm")
RULES = ("min_snr", "soft_min_snr", "p2", "debiased", "truncated", "sigma_sqrt", "cosmap")
GAMMAS = {"min_snr": 5.0, "soft_min_snr": 4.0, "p2": 1.0}  # defaults of the papers; the other rules have no gamma

# Log-SNRs are clamped to this limit, where every weight has converged, so that no term becomes inf - inf.
_LIMIT = 150.0


def snr_weight(
    log_snr: Tensor,
    rule: str = "min_snr",
    gamma: float | None = None,
    prediction: str = "eps",
    zero_snr: str = "unit",
    sigma_data: float = 1.0,
) -> Tensor:
    """Return weights for the squared errors of a diffusion model at the given noise levels.

    For one rule, the gradient with respect to the predicted x0 is the same whatever the network predicts.

    Args:
        log_snr: ``log(alpha^2 / sigma^2)`` of each sample, any shape. ``-inf`` is pure noise, ``+inf`` is pure data.
        rule: ``min_snr``, ``soft_min_snr``, ``p2``, ``debiased``, ``truncated``, ``sigma_sqrt`` or ``cosmap``.
        gamma: Parameter above 0. For ``min_snr`` and ``soft_min_snr`` it is the limit of the weight of x0 as the noise
            vanishes, for ``p2`` it is the exponent. ``None`` takes the paper's: 5, 4 and 1. Other rules have none.
        prediction: Target in which the error is measured: ``eps``, ``v``, ``x0``, ``flow`` (noise minus data) or
            ``edm`` (raw network of EDM). The unweighted error of ``edm`` is the weighting of its paper, which the rule
            replaces.
        zero_snr: Weight at exactly zero SNR, the last step of a zero-terminal schedule. ``unit`` gives the weight 1 for
            every rule and target. The rules themselves would give 0, 0/0 or infinity. ``error`` raises an error.
        sigma_data: Standard deviation of the data in the definition of ``edm``. The other targets do not use it.

    Returns:
        Weights of the shape of ``log_snr``, float32 at least. They are finite for finite float32 SNRs (for
        ``sigma_sqrt`` up to e^40). Some grow without bound: as the noise vanishes ``sigma_sqrt``, and for ``x0`` also
        ``debiased``, ``truncated`` and ``cosmap``; as the signal vanishes ``debiased`` for ``eps``.

    Raises:
        ConfigurationError: For an argument out of range, or a zero SNR with ``zero_snr="error"``.

    Example:
        >>> snr_weight(torch.tensor([0.0, 4.0]).log(), gamma=2.0, prediction="v", zero_snr="unit")
        tensor([1.0000, 0.4000])
    """
    check_snr_arguments(rule, gamma, prediction, zero_snr)
    log_snr = log_snr.to(torch.promote_types(log_snr.dtype, torch.float32))
    bounded = log_snr.clamp(-_LIMIT, _LIMIT)
    if gamma is None:
        gamma = GAMMAS.get(rule, 1.0)
    weight = (_log_weight_of_x0(bounded, rule, gamma) - _log_jacobian(bounded, prediction, sigma_data)).exp()
    zero = torch.isneginf(log_snr)
    if zero_snr == "error" and bool(zero.any()):
        raise ConfigurationError(
            "snr_weight: zero_snr='error', but the batch has samples at zero SNR (a zero-terminal schedule): "
            "use zero_snr='unit', or a schedule that ends above zero"
        )
    return torch.where(zero, torch.ones_like(weight), weight)


def _log_weight_of_x0(log_snr: Tensor, rule: str, gamma: float) -> Tensor:
    if rule == "p2":
        return log_snr - gamma * softplus(log_snr)
    if rule == "debiased":
        return log_snr / 2
    if rule == "truncated":
        return log_snr.clamp(min=0.0)
    noise = -softplus(log_snr / 2)  # log(s)
    signal = -softplus(-log_snr / 2)  # log(1 - s)
    if rule == "sigma_sqrt":
        return -4 * noise
    if rule == "cosmap":
        return math.log(2 / math.pi) - torch.logaddexp(2 * noise, 2 * signal) - 2 * noise
    log_gamma = log_snr.new_full((), gamma).log()
    if rule == "soft_min_snr":
        return log_gamma + logsigmoid(log_snr - log_gamma)
    return torch.minimum(log_snr, log_gamma)


def _log_jacobian(log_snr: Tensor, prediction: str, sigma_data: float) -> Tensor:
    """Return ``log (dT/dx0)^2`` for a fixed noisy sample."""
    if prediction == "edm":
        return torch.logaddexp(log_snr, torch.full_like(log_snr, -2.0 * math.log(sigma_data)))
    if prediction == "eps":
        return log_snr
    if prediction == "v":
        return softplus(log_snr)
    if prediction == "flow":
        return 2 * softplus(log_snr / 2)
    return torch.zeros_like(log_snr)


def check_snr_arguments(
    rule: str, gamma: float | None, prediction: str, zero_snr: str, *, who: str = "snr_weight"
) -> None:
    """Raise ConfigurationError for an argument of :func:`snr_weight` out of range. ``who`` begins the message."""
    check_choice(who, "rule", rule, RULES)
    if gamma is not None and rule not in GAMMAS:
        raise refusal(who, "gamma", f"unset (null in YAML) for rule {rule!r}", gamma)
    check_number(who, "gamma", gamma, above=0, null=True)
    check_choice(who, "prediction", prediction, PREDICTIONS)
    check_choice(who, "zero_snr", zero_snr, ("unit", "error"))

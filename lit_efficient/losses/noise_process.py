"""Diffusion processes: the amounts of signal and noise at each time.

    x_t = alpha(t) x0 + sigma(t) eps,    t in [0, 1], from data to noise

    flow            alpha = 1 - t,           sigma = t             Lipman et al. (2022),
    https://arxiv.org/abs/2210.02747
    cosine          alpha = cos(pi t / 2),   sigma = sin(pi t / 2)
    squared_cosine  abar_k = prod 1 - beta, beta from cos^2 with an offset, at most 0.999
                                                          Nichol and Dhariwal (2021), https://arxiv.org/abs/2102.09672
    linear          beta_k evenly spaced from beta_start to beta_end    Ho et al. (2020),
    https://arxiv.org/abs/2006.11239 scaled_linear   sqrt(beta_k) evenly spaced (Stable Diffusion)  Rombach et al.
    (2022), https://arxiv.org/abs/2112.10752
    edm             alpha = 1,  sigma^(1/7) evenly spaced from 0.002 to 80
                                                             Karras et al. (2022), https://arxiv.org/abs/2206.00364

The three tables of betas are those of diffusers: its integer timestep k of N is time (k + 1) / N here, and time 0 is
data. Between two entries the angle atan(sigma / alpha) is interpolated. This keeps the process variance-preserving, and
accurate at both ends in float32, where ``sqrt(1 - alpha^2)`` loses most of its digits.

Zero terminal SNR (Lin et al. 2023, https://arxiv.org/abs/2305.08891) shifts and scales sqrt(abar) so that the last step
has no signal. Otherwise training never sees the pure noise from which sampling starts, and all samples have medium
brightness.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal

Schedule = Literal["flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm"]

STEPS = 1000  # entries in a table of betas
TABLES = ("squared_cosine", "linear", "scaled_linear")
BETAS = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}  # of DDPM, and of Stable Diffusion
SIGMA_MIN = 0.002  # noise levels and exponent of EDM
SIGMA_MAX = 80.0
RHO = 7.0
_NO_SIGNAL = 1e-4  # an alpha / sigma below this counts as pure noise; squared_cosine ends at half of it, linear at 60x
_LEAST_SIGNAL = 1e-6  # smallest alpha that float32 samplers can distinguish from 0
_WHOLE = 1e-2  # distance from a whole entry of a table that counts as rounding
AFTER_ZERO = 1e-6  # time of EDM's lowest noise level; at time 0 there is no noise
# Training times of schedules that begin with pure data and end in pure noise. Log-SNRs are finite between them.
T_RANGE = (1e-3, 1.0 - 1e-3)
_LOW = SIGMA_MIN ** (1 / RHO)
_HIGH = SIGMA_MAX ** (1 / RHO)


@checks_types
@dataclass(frozen=True)
class DiffusionProcess:
    """Complete description of a diffusion process, used by training, target conversions and all samplers.

    Args:
        schedule: flow, cosine, squared_cosine, linear, scaled_linear or edm.
        beta_start: First beta of linear and scaled_linear. null takes 0.0001 and 0.00085.
        beta_end: Last beta of linear and scaled_linear. null takes 0.02 and 0.012.
        zero_terminal_snr: Rescale a table of betas so that it ends in pure noise. flow and cosine always do.
        sigma_data: Standard deviation of the data, for EDM's preconditioning. Normalised latents have 1.
        offset_noise: Strength of additional noise that is constant over each channel. 0.05 to 0.1 lets a network
            without zero terminal SNR learn the overall brightness.
        input_perturbation: Strength of additional noise in the network's input that is not part of the target. Ning et
            al. (2023), https://arxiv.org/abs/2301.11706, use 0.1.

    Raises:
        ConfigurationError: For an argument out of range, or one that the schedule does not use.
    """

    schedule: Schedule = "flow"
    beta_start: float | None = None
    beta_end: float | None = None
    zero_terminal_snr: bool = False
    sigma_data: float = 1.0
    offset_noise: float = 0.0
    input_perturbation: float = 0.0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("beta_start", "beta_end"):
            value = getattr(self, name)
            if value is not None and self.schedule not in BETAS:
                raise refusal(
                    owner, name, f"unset for schedule {self.schedule!r} (for {' and '.join(BETAS)} only)", value
                )
        first, last = self.betas_range
        check_number(owner, "beta_end", last, below=1)
        check_number(owner, "beta_start", first, above=0, most=last)
        if self.schedule in BETAS and float((1.0 - _betas(self)).prod()) < _LEAST_SIGNAL**2:
            allowed = f"smaller: with beta_start {first}, alpha falls below {_LEAST_SIGNAL} before the last step"
            raise refusal(owner, "beta_end", allowed, last)
        if self.zero_terminal_snr and self.schedule not in TABLES:
            if self.schedule == "edm":
                reason = "has no last step"
            else:
                reason = "always ends in pure noise"
            allowed = f"False for schedule {self.schedule!r}, which {reason} (it rescales {', '.join(TABLES)})"
            raise refusal(owner, "zero_terminal_snr", allowed, True)
        check_number(owner, "sigma_data", self.sigma_data, above=0)
        check_number(owner, "offset_noise", self.offset_noise, least=0, below=1)
        check_number(owner, "input_perturbation", self.input_perturbation, least=0, below=1)

    @property
    def betas_range(self) -> tuple[float, float]:
        """First and last beta. Schedules without betas return those of linear."""
        first, last = BETAS.get(self.schedule, BETAS["linear"])
        if self.beta_start is not None:
            first = self.beta_start
        if self.beta_end is not None:
            last = self.beta_end
        return first, last

    @property
    def t_range(self) -> tuple[float, float]:
        """Range of training times. A table is trained at every entry, including the last one."""
        if self.schedule in TABLES:
            return (1.0 / STEPS, 1.0)
        return T_RANGE

    @property
    def ends_in_noise(self) -> bool:
        """True if (almost) no signal is left at time 1, so that eps does not determine x0 there."""
        alpha, sigma = self.alpha_sigma(torch.ones(1, dtype=torch.float64, device="cpu"))
        return alpha.item() < _NO_SIGNAL * sigma.item()

    @property
    def prior_scale(self) -> float:
        """Standard deviation of the noise from which sampling starts."""
        return SIGMA_MAX if self.schedule == "edm" else 1.0

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of signal and noise at times ``t`` in [0, 1], each of the shape and dtype of ``t``."""
        if self.schedule == "flow":
            return 1.0 - t, t
        if self.schedule == "edm":
            return torch.ones_like(t), karras_sigma(t)
        angle = t * (math.pi / 2) if self.schedule == "cosine" else self._angle(t)
        return torch.cos(angle).clamp(min=0.0), torch.sin(angle)  # cos(pi/2) in float32 is just below 0

    def log_snr(self, t: Tensor) -> Tensor:
        """Return ``log(alpha^2 / sigma^2)`` at times ``t``: +inf without noise, and -inf without signal."""
        alpha, sigma = self.alpha_sigma(t)
        return 2.0 * (alpha.log() - sigma.log())

    def input_scale(self, t: Tensor) -> Tensor:
        """Return the factor on the noisy data in the network's input: c_in for edm, 1 for the others."""
        if self.schedule != "edm":
            return torch.ones_like(t)
        return (karras_sigma(t).square() + self.sigma_data**2).rsqrt()

    def network_time(self, t: Tensor) -> Tensor:
        """Return the time input of this package's networks: k / N for tables, log(sigma) / 4 for edm, else ``t``."""
        if self.schedule == "edm":
            return karras_sigma(t).log() / 4.0
        if self.schedule in TABLES:
            return t - 1.0 / STEPS
        return t

    def timestep(self, t: Tensor) -> Tensor:
        """Return the time input of networks in diffusers' pipelines.

        It is the entry k of a table (with a fraction between two entries), log(sigma) / 4 for edm, and 1000 ``t`` for
        the others.
        """
        if self.schedule == "edm":
            return self.network_time(t)
        if self.schedule in TABLES:
            entry = t * STEPS - 1.0
            nearest = entry.round()
            # Products in float32 miss whole entries by up to 1e-4.
            return torch.where((entry - nearest).abs() < _WHOLE, nearest, entry).clamp(min=0.0)
        return t * STEPS

    def on_grid(self, t: Tensor) -> Tensor:
        """Round times in [0, 1] up to the entries of a table, at least 1 / N. Other schedules return ``t``."""
        if self.schedule in TABLES:
            return (t * STEPS).ceil().clamp(1, STEPS) / STEPS
        return t

    def _angle(self, t: Tensor) -> Tensor:
        table = _angles(self, t.device, t.dtype)
        position = (t * STEPS).clamp(0, STEPS)
        below = position.floor().clamp(max=STEPS - 1)
        index = below.long()
        return torch.lerp(table[index], table[index + 1], position - below)


def as_process(process: Schedule | DiffusionProcess) -> DiffusionProcess:
    """Return the process itself, or the process with default settings for the name of a schedule."""
    if isinstance(process, DiffusionProcess):
        return process
    return DiffusionProcess(process)


def karras_sigma(t: Tensor) -> Tensor:
    """Return EDM's noise level at times ``t``: 0.002 to 80, and 0 at time 0, where sampling ends on data."""
    return torch.where(t > 0, (_LOW + t * (_HIGH - _LOW)) ** RHO, torch.zeros_like(t))


def karras_time(sigma: Tensor) -> Tensor:
    """Return the time of EDM's noise levels, above 0. It is the inverse of :func:`karras_sigma` from 0.002 on."""
    return ((sigma ** (1 / RHO) - _LOW) / (_HIGH - _LOW)).clamp(min=AFTER_ZERO)


def alphas_cumprod(process: DiffusionProcess) -> Tensor:
    """Return ``alpha^2`` at times 1/N, 2/N ... 1 of a variance-preserving process, [N] float64.

    Raises:
        ConfigurationError: For flow and edm.
    """
    if process.schedule == "cosine":
        times = torch.arange(1, STEPS + 1, dtype=torch.float64, device="cpu") / STEPS
        return process.alpha_sigma(times)[0].square()
    if process.schedule not in TABLES:
        raise ConfigurationError(f"alphas_cumprod: schedule {process.schedule!r} is not variance-preserving")
    cumulative = (1.0 - _betas(process)).cumprod(dim=0)
    if not process.zero_terminal_snr:
        return cumulative
    root = cumulative.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


def _betas(process: DiffusionProcess) -> Tensor:
    """Return the table of betas on the CPU, also where a network is built on the meta device."""
    if process.schedule == "squared_cosine":
        times = torch.arange(STEPS + 1, dtype=torch.float64, device="cpu") / STEPS
        level = ((times + 0.008) / 1.008 * (math.pi / 2)).cos().square()
        return (1.0 - level[1:] / level[:-1]).clamp(max=0.999)
    first, last = process.betas_range
    if process.schedule == "linear":
        return torch.linspace(first, last, STEPS, dtype=torch.float64, device="cpu")
    return torch.linspace(first**0.5, last**0.5, STEPS, dtype=torch.float64, device="cpu").square()


@lru_cache(maxsize=32)
def _angles(process: DiffusionProcess, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the angles atan(sigma / alpha) at times 0, 1/N ... 1."""
    # The cached tensor is also used in training, and after `plan` has built a module without memory.
    with torch.inference_mode(False), torch.device("cpu"):
        alpha_squared = alphas_cumprod(process)
        angle = torch.atan2((1.0 - alpha_squared).sqrt(), alpha_squared.sqrt())
        return (
            torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), angle])
            .to(dtype)
            .to(device, non_blocking=True)
        )

"""One description of a diffusion process: how much signal and how much noise there is at each time.

    x_t = alpha(t) x0 + sigma(t) eps,    t in [0, 1], from data to noise

    flow            alpha = 1 - t,           sigma = t             Lipman et al. (2022), https://arxiv.org/abs/2210.02747
    cosine          alpha = cos(pi t / 2),   sigma = sin(pi t / 2)
    squared_cosine  abar_k = prod 1 - beta, beta from cos^2 with an offset, at most 0.999
                                                          Nichol and Dhariwal (2021), https://arxiv.org/abs/2102.09672
    linear          beta_k evenly spaced from beta_start to beta_end    Ho et al. (2020), https://arxiv.org/abs/2006.11239
    scaled_linear   sqrt(beta_k) evenly spaced (Stable Diffusion)  Rombach et al. (2022), https://arxiv.org/abs/2112.10752
    edm             alpha = 1,  sigma^(1/7) evenly spaced from 0.002 to 80
                                                             Karras et al. (2022), https://arxiv.org/abs/2206.00364

The three tables of betas are those of diffusers: its integer timestep k of N is our time (k + 1) / N, and time 0 is
data. Between two entries the angle atan(sigma / alpha) is interpolated, which stays variance-preserving and exact at
both ends in float32, where ``sqrt(1 - alpha^2)`` loses most of its digits.

Zero terminal SNR (Lin et al. 2023, https://arxiv.org/abs/2305.08891) shifts and stretches sqrt(abar) so that the last
step holds no signal: otherwise training never sees what sampling starts from, and samples are of medium brightness.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal

Schedule = Literal["flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm"]

STEPS = 1000  # entries of a table of betas
TABLES = ("squared_cosine", "linear", "scaled_linear")
BETAS = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}  # DDPM's; Stable Diffusion's
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0
_NO_SIGNAL = 1e-4  # alpha / sigma that is as good as none: squared_cosine ends at half of it, linear at 60 of it
_LEAST_SIGNAL = 1e-6  # the alpha that float32, in which samplers work, can still tell from 0
AFTER_ZERO = 1e-6  # the time of EDM's lowest noise level: at 0 itself there is none
# Times at which a schedule that ends in pure noise and begins with pure data is trained: log-SNRs are finite there.
T_RANGE = (1e-3, 1.0 - 1e-3)


@dataclass(frozen=True)
class DiffusionProcess:
    """The process, complete: training, conversions between targets, and every sampler read it from here.

    Args:
        schedule: flow, cosine, squared_cosine, linear, scaled_linear or edm.
        beta_start: First beta of linear and scaled_linear; null for 0.0001 and 0.00085.
        beta_end: Last one; null for 0.02 and 0.012.
        zero_terminal_snr: Rescale a table of betas so that it ends in pure noise; flow and cosine do so anyway.
        sigma_data: Standard deviation of the data, for EDM's preconditioning. Normalised latents have 1.
        offset_noise: Strength of a noise that is constant over a channel, added to the ordinary one; 0.05 to 0.1 lets
            a network without zero terminal SNR learn overall brightness.
        input_perturbation: Strength of a further noise that the network sees and is not asked for; 0.1 in Ning et al.
            (2023), https://arxiv.org/abs/2301.11706.

    Raises:
        ConfigurationError: For an argument out of range, or one that the schedule has no use for.
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
        check_choice(owner, "schedule", self.schedule, get_args(Schedule))
        for name in ("beta_start", "beta_end"):
            value = getattr(self, name)
            if value is not None and self.schedule not in BETAS:
                raise ConfigurationError(
                    f"{owner}: {name} belongs to {' and '.join(BETAS)}; schedule {self.schedule!r} has none, leave it "
                    f"unset instead of {value!r}."
                )
        first, last = self.betas_range
        check_number(owner, "beta_end", last, below=1)
        check_number(owner, "beta_start", first, above=0, most=last)
        if self.schedule in BETAS and float((1.0 - _betas(self)).prod()) < _LEAST_SIGNAL**2:
            allowed = f"smaller: with beta_start {first} alpha is below {_LEAST_SIGNAL} long before the last step, as 0"
            raise refusal(owner, "beta_end", allowed, last)
        if self.zero_terminal_snr and self.schedule not in TABLES:
            raise ConfigurationError(
                f"{owner}: zero_terminal_snr rescales {', '.join(TABLES)}; schedule {self.schedule!r} "
                + ("has no last step to rescale." if self.schedule == "edm" else "ends in pure noise already.")
            )
        check_number(owner, "sigma_data", self.sigma_data, above=0)
        check_number(owner, "offset_noise", self.offset_noise, least=0, below=1)
        check_number(owner, "input_perturbation", self.input_perturbation, least=0, below=1)

    @property
    def betas_range(self) -> tuple[float, float]:
        """First and last beta; of schedules without betas, those of linear."""
        first, last = BETAS.get(self.schedule, BETAS["linear"])
        return first if self.beta_start is None else self.beta_start, last if self.beta_end is None else self.beta_end

    @property
    def t_range(self) -> tuple[float, float]:
        """Times that training draws from. A table is trained at every entry, the last one too."""
        return (1.0 / STEPS, 1.0) if self.schedule in TABLES else T_RANGE

    @property
    def ends_in_noise(self) -> bool:
        """Whether nothing (or nearly nothing) of the data is left at time 1, so that eps does not determine x0."""
        alpha, sigma = self.alpha_sigma(torch.ones(1, dtype=torch.float64, device="cpu"))
        return alpha.item() < _NO_SIGNAL * sigma.item()

    @property
    def prior_scale(self) -> float:
        """Standard deviation of what sampling starts from."""
        return SIGMA_MAX if self.schedule == "edm" else 1.0

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of signal and noise at times ``t`` (any shape, in [0, 1]); the same shape and precision each."""
        if self.schedule == "flow":
            return 1.0 - t, t
        if self.schedule == "edm":
            return torch.ones_like(t), karras_sigma(t)
        angle = t * (math.pi / 2) if self.schedule == "cosine" else self._angle(t)
        return torch.cos(angle).clamp(min=0.0), torch.sin(angle)  # cos(pi/2) in float32 is just below 0

    def log_snr(self, t: Tensor) -> Tensor:
        """``log(alpha^2 / sigma^2)`` at times ``t``; +inf where there is no noise, -inf where there is no signal."""
        alpha, sigma = self.alpha_sigma(t)
        return 2.0 * (alpha.log() - sigma.log())

    def input_scale(self, t: Tensor) -> Tensor:
        """What the noisy data is multiplied by before the network sees it: EDM's c_in, 1 for the others."""
        if self.schedule != "edm":
            return torch.ones_like(t)
        return (karras_sigma(t).square() + self.sigma_data**2).rsqrt()

    def network_time(self, t: Tensor) -> Tensor:
        """What our own networks get as the time: k / N for tables, log(sigma) / 4 for edm, else itself."""
        if self.schedule == "edm":
            return karras_sigma(t).log() / 4.0
        return t - 1.0 / STEPS if self.schedule in TABLES else t

    def timestep(self, t: Tensor) -> Tensor:
        """What diffusers' pipelines tell a network of the time: the entry k of a table, log(sigma) / 4 for edm, else
        1000 times the time.
        """
        if self.schedule == "edm":
            return self.network_time(t)
        return (t * STEPS - 1.0).round().clamp(min=0.0) if self.schedule in TABLES else t * STEPS

    def on_grid(self, t: Tensor) -> Tensor:
        """Times in [0, 1] rounded up to the entries of a table, 1 / N at least; other schedules have none."""
        return (t * STEPS).ceil().clamp(1, STEPS) / STEPS if self.schedule in TABLES else t

    def _angle(self, t: Tensor) -> Tensor:
        table = _angles(self, t.device, t.dtype)
        position = (t * STEPS).clamp(0, STEPS)
        below = position.floor().clamp(max=STEPS - 1)
        index = below.long()
        return torch.lerp(table[index], table[index + 1], position - below)


def as_process(process: Schedule | DiffusionProcess) -> DiffusionProcess:
    """A schedule's name stands for the process with nothing else set."""
    return process if isinstance(process, DiffusionProcess) else DiffusionProcess(process)


def karras_sigma(t: Tensor) -> Tensor:
    """Noise levels of EDM, 0.002 to 80; 0 at time 0, so that the last step of a sampler ends on data."""
    low, high = SIGMA_MIN ** (1 / RHO), SIGMA_MAX ** (1 / RHO)
    return torch.where(t > 0, (low + t * (high - low)) ** RHO, torch.zeros_like(t))


def karras_time(sigma: Tensor) -> Tensor:
    """The time of a noise level, above 0: the inverse of :func:`karras_sigma` from the lowest level on."""
    low, high = SIGMA_MIN ** (1 / RHO), SIGMA_MAX ** (1 / RHO)
    return ((sigma ** (1 / RHO) - low) / (high - low)).clamp(min=AFTER_ZERO)


def alphas_cumprod(process: DiffusionProcess) -> Tensor:
    """``alpha^2`` at times 1/N, 2/N ... 1 of a variance-preserving process, [N] float64."""
    if process.schedule == "cosine":
        times = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
        return process.alpha_sigma(times)[0].square()
    if process.schedule not in TABLES:
        raise ConfigurationError(f"alphas_cumprod: schedule {process.schedule!r} is not variance-preserving.")
    cumulative = (1.0 - _betas(process)).cumprod(dim=0)
    if not process.zero_terminal_snr:
        return cumulative
    root = cumulative.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


def _betas(process: DiffusionProcess) -> Tensor:
    if process.schedule == "squared_cosine":
        times = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
        level = ((times + 0.008) / 1.008 * (math.pi / 2)).cos().square()
        return (1.0 - level[1:] / level[:-1]).clamp(max=0.999)
    first, last = process.betas_range
    if process.schedule == "linear":
        return torch.linspace(first, last, STEPS, dtype=torch.float64)
    return torch.linspace(first**0.5, last**0.5, STEPS, dtype=torch.float64).square()


@lru_cache(maxsize=32)
def _angles(process: DiffusionProcess, device: torch.device, dtype: torch.dtype) -> Tensor:
    """atan(sigma / alpha) at times 0, 1/N ... 1."""
    with torch.inference_mode(False):  # kept and used in training later
        alpha_squared = alphas_cumprod(process)
        angle = torch.atan2((1.0 - alpha_squared).sqrt(), alpha_squared.sqrt())
        return torch.cat([torch.zeros(1, dtype=torch.float64), angle]).to(dtype).to(device, non_blocking=True)

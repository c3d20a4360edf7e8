"""Distributions of the training times of a diffusion model.

    uniform        u
    logit_normal   sigmoid(location + scale n)
    mode           1 - u - scale (cos^2(pi u / 2) - 1 + u)         more in the middle, but also at both ends
    log_normal     log sigma = location + scale n                  (noise levels of EDM)
    then shifted:  t <- s t / (1 + (s - 1) t)

with ``u`` uniform and ``n`` normal. For flow, where sigma / alpha = t / (1 - t), log_normal would be logit_normal.

The shift adapts to the resolution: neighbouring pixels of a large image are similar, so the same noise hides less of
it. SD3 uses s = sqrt(m / n) for m tokens, if a shift of 1 suits n tokens; Flux uses s = exp(a + b m).

Two times for each sample (Dual-Timestep Scheduling) hide more in some tokens than in others, so that the network has
to infer them from the others:

    tau_i = s for token i with probability r, else t;    s and t from the same distribution, so that tau_i is, too

Source: Esser et al. (2024), https://arxiv.org/abs/2403.03206; Karras et al. (2022), https://arxiv.org/abs/2206.00364;
two times: Chefer et al. (2026), https://arxiv.org/abs/2603.06507.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number, checks_types, refusal
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule, as_process, karras_time
from lit_efficient.surgery import moved

Distribution = Literal["uniform", "logit_normal", "mode", "log_normal"]

_LOCATIONS = {"logit_normal": 0.0, "log_normal": -1.2}
_SCALES = {"logit_normal": 1.0, "mode": 1.29, "log_normal": 1.2}
_MODE_LIMIT = 2.0 / (math.pi - 2.0)  # with a larger scale, or one below -1, the map of `mode` is not monotonic


@checks_types
@dataclass(frozen=True)
class ResolutionShift:
    """Shift of the times that depends on the resolution, as in the schedulers of Flux and Qwen-Image.

        mu = base_shift + (m - base_tokens) (max_shift - base_shift) / (max_tokens - base_tokens)    for m tokens
        s = exp(mu) (exponential), or s = mu (linear)

    Args:
        base_tokens: Tokens of an image with ``base_shift``.
        max_tokens: Tokens of an image with ``max_shift``.
        base_shift: mu for ``base_tokens``.
        max_shift: mu for ``max_tokens``.
        kind: exponential or linear.
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_shift: float = 0.5
    max_shift: float = 1.15
    kind: Literal["exponential", "linear"] = "exponential"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_number(owner, "base_tokens", self.base_tokens, least=1, whole=True)
        check_number(owner, "max_tokens", self.max_tokens, above=self.base_tokens, whole=True)
        check_choice(owner, "kind", self.kind, ("exponential", "linear"))

    def at(self, tokens: int) -> float:
        """Return the shift for images of ``tokens`` tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = self.base_shift + (tokens - self.base_tokens) * slope
        if self.kind == "linear":
            return mu
        return math.exp(mu)


Shift = float | ResolutionShift


def shift_at(shift: Shift | None, tokens: int = 1) -> float:
    """Return the shift as a number: for images of ``tokens`` tokens, and 1 for ``None``."""
    if shift is None:
        return 1.0
    if isinstance(shift, ResolutionShift):
        return shift.at(tokens)
    return shift


def read_shift(owner: str, shift: Any) -> Shift | None:
    """Return a checked shift. Checkpoints hold a `ResolutionShift` as a dictionary."""
    if isinstance(shift, dict):
        return ResolutionShift(**shift)
    if not isinstance(shift, ResolutionShift):
        check_number(owner, "shift", shift, above=0, null=True)
    return shift


@checks_types
@dataclass(frozen=True)
class TimestepSampling:
    """Distribution of training times.

    Args:
        distribution: uniform, logit_normal, mode or log_normal, which is EDM's distribution of noise levels.
        location: Mean of the normal variable. null takes 0 (logit_normal) or -1.2 (log_normal).
        scale: Standard deviation of the normal variable, or strength of mode. null takes 1 (logit_normal), 1.29 (mode)
            or 1.2 (log_normal).
        shift: Above 0. Values above 1 move all times towards noise, as large latents need. A `ResolutionShift` depends
            on the size of the latents. null takes that of the network's pipeline, or 1.
        second_share: Probability, at most 0.5, that a token gets a second time of its sample, in training only
            (Self-Flow has 0.25). The network must take a time for each token, as our diffusion transformer does.
            Samples then have no noise level, which techniques such as `SNRWeighting` need.

    Raises:
        ConfigurationError: For an argument out of range, or one that the distribution does not use.
    """

    distribution: Distribution = "logit_normal"
    location: float | None = None
    scale: float | None = None
    shift: float | ResolutionShift | None = None
    second_share: float = 0.0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        name = self.distribution
        for argument, defaults in (("location", _LOCATIONS), ("scale", _SCALES)):
            if getattr(self, argument) is not None and name not in defaults:
                raise refusal(owner, argument, f"unset for {name}", getattr(self, argument))
        check_number(owner, "location", self.location, null=True)
        if name == "mode":
            check_number(owner, "scale", self.scale, least=-1, most=_MODE_LIMIT, null=True)
        else:
            check_number(owner, "scale", self.scale, above=0, null=True)
        object.__setattr__(self, "shift", read_shift(owner, self.shift))
        check_number(owner, "second_share", self.second_share, least=0, most=0.5)

    @property
    def location_or_default(self) -> float:
        """Location, with the default of the distribution."""
        if self.location is None:
            return _LOCATIONS.get(self.distribution, 0.0)
        return self.location

    @property
    def scale_or_default(self) -> float:
        """Scale, with the default of the distribution."""
        if self.scale is None:
            return _SCALES.get(self.distribution, 1.0)
        return self.scale


def shift_times(t: Tensor, shift: float) -> Tensor:
    """Return ``s t / (1 + (s - 1) t)``, which divides the signal-to-noise ratio of flow at each time by ``s^2``."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def sample_timesteps(
    count: int,
    sampling: Distribution | TimestepSampling,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    process: Schedule | DiffusionProcess = "flow",
    tokens: int = 1,
) -> Tensor:
    """Draw training times, [count] float32, in the process's ``t_range``, rounded to its table if it has one.

    Args:
        count: Number of times.
        sampling: The distribution.
        generator: Random generator. ``None`` takes torch's global generator of ``device``.
        device: Device of the result.
        process: Process that is trained. ``log_normal`` is a distribution of EDM's noise levels and needs ``edm``.
        tokens: Tokens of a sample, for a `ResolutionShift`.

    Raises:
        ConfigurationError: For a distribution that the process does not support.
    """
    if not isinstance(sampling, TimestepSampling):
        check_choice("sample_timesteps", "sampling", sampling, get_args(Distribution))
        sampling = TimestepSampling(sampling)
    process = as_process(process)
    check_sampling("sample_timesteps", sampling, process)
    drawn_on = device if generator is None else generator.device
    # float32 even if torch's default dtype is a 16-bit type, in which most timesteps of a table do not exist.
    draw = partial(torch.empty, count, dtype=torch.float32, device=drawn_on)
    location = sampling.location_or_default
    scale = sampling.scale_or_default
    match sampling.distribution:
        case "uniform":
            t = draw().uniform_(generator=generator)
        case "mode":
            u = draw().uniform_(generator=generator)
            t = 1.0 - u - scale * ((math.pi * u / 2).cos().square() - 1.0 + u)
        case _:
            normal = location + scale * draw().normal_(generator=generator)
            if sampling.distribution == "log_normal":
                t = karras_time(normal.exp())
            else:
                t = normal.sigmoid()
    t = shift_times(t.clamp(0.0, 1.0), shift_at(sampling.shift, tokens))
    return moved(process.on_grid(t.clamp(*process.t_range)), device)


def token_times(t: Tensor, second: Tensor, share: float, tokens: int) -> Tensor:
    """Return a time for each token, [B, tokens]: ``second`` with the probability ``share``, else ``t``, [B] each.

    Torch's global generator of the device draws the tokens.
    """
    replaced = torch.rand(len(t), tokens, device=t.device) < share
    return torch.where(replaced, second[:, None], t[:, None])


def on_latents(times: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """Return the times [B, N] of tokens, row by row, at the positions of latents of a height and width, [B, 1, h, w].

    Args:
        times: Times of the tokens. Times of samples, [B], are returned unchanged.
        size: Height and width of the latents.
        patch: Height and width of a token.
    """
    if times.ndim == 1:
        return times
    grid = times.view(len(times), 1, size[0] // patch, size[1] // patch)
    return grid.repeat_interleave(patch, dim=2).repeat_interleave(patch, dim=3)


def check_sampling(owner: str, sampling: TimestepSampling, process: DiffusionProcess) -> None:
    """Raise ConfigurationError for a distribution that the process does not support. ``owner`` begins the message."""
    if sampling.distribution == "log_normal" and process.schedule != "edm":
        raise refusal(owner, "schedule", "edm for log_normal noise levels", process.schedule)

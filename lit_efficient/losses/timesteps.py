"""Which times a diffusion model is trained at: more often where the problem is hard.

    uniform        u
    logit_normal   sigmoid(location + scale n)
    mode           1 - u - scale (cos^2(pi u / 2) - 1 + u)         heavy in the middle, and never without the ends
    log_normal     log sigma = location + scale n                  (EDM's noise levels)
    then shifted:  t <- s t / (1 + (s - 1) t)

with ``u`` uniform and ``n`` normal. For flow, where sigma / alpha = t / (1 - t), log_normal would be logit_normal.

The shift is for resolution: neighbouring pixels of a large picture agree, so the same noise hides less of it. SD3 takes
s = sqrt(m / n) for m tokens where a shift of 1 is right for n.

Source: Esser et al. (2024), https://arxiv.org/abs/2403.03206; Karras et al. (2022), https://arxiv.org/abs/2206.00364.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number, refusal
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule, as_process, karras_time
from lit_efficient.surgery import moved

Distribution = Literal["uniform", "logit_normal", "mode", "log_normal"]

_LOCATIONS = {"logit_normal": 0.0, "log_normal": -1.2}
_SCALES = {"logit_normal": 1.0, "mode": 1.29, "log_normal": 1.2}
_MODE_LIMIT = 2.0 / (math.pi - 2.0)  # beyond it, or below -1, the map is not monotone


@dataclass(frozen=True)
class TimestepSampling:
    """The distribution of training times.

    Args:
        distribution: uniform, logit_normal, mode or log_normal; the last one is EDM's, of its noise levels.
        location: Mean of the normal variable; null for 0 (logit_normal) and -1.2 (log_normal).
        scale: Its standard deviation, or the strength of mode; null for 1 (logit_normal), 1.29 (mode) and
            1.2 (log_normal).
        shift: Above 0; more than 1 moves all times towards noise, as large latents need.

    Raises:
        ConfigurationError: For an argument out of range, or one that the distribution has no use for.
    """

    distribution: Distribution = "logit_normal"
    location: float | None = None
    scale: float | None = None
    shift: float = 1.0

    def __post_init__(self) -> None:
        owner, name = type(self).__name__, self.distribution
        check_choice(owner, "distribution", name, get_args(Distribution))
        for argument, defaults in (("location", _LOCATIONS), ("scale", _SCALES)):
            if getattr(self, argument) is not None and name not in defaults:
                raise refusal(owner, argument, f"unset for {name}", getattr(self, argument))
        check_number(owner, "location", self.location, null=True)
        if name == "mode":
            check_number(owner, "scale", self.scale, least=-1, most=_MODE_LIMIT, null=True)
        else:
            check_number(owner, "scale", self.scale, above=0, null=True)
        check_number(owner, "shift", self.shift, above=0)

    @property
    def location_or_default(self) -> float:
        """The location in use."""
        return _LOCATIONS.get(self.distribution, 0.0) if self.location is None else self.location

    @property
    def scale_or_default(self) -> float:
        """The scale in use."""
        return _SCALES.get(self.distribution, 1.0) if self.scale is None else self.scale


def shift_times(t: Tensor, shift: float) -> Tensor:
    """``s t / (1 + (s - 1) t)``: keeps 0 and 1, divides the flow's signal-to-noise ratio at each time by ``s^2``."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def sample_timesteps(
    count: int,
    sampling: Distribution | TimestepSampling,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    process: Schedule | DiffusionProcess = "flow",
) -> Tensor:
    """Random training times, [count] float32, within the process's ``t_range`` and on its grid if it has one.

    Args:
        count: How many.
        sampling: The distribution.
        generator: Where the draws come from; None is torch's global generator.
        device: Where the result lies; without a generator the draws are made there.
        process: What is trained. ``log_normal`` is a distribution of EDM's noise levels and needs ``edm``.
    """
    if not isinstance(sampling, TimestepSampling):
        check_choice("sample_timesteps", "sampling", sampling, get_args(Distribution))
        sampling = TimestepSampling(sampling)
    process = as_process(process)
    check_sampling("sample_timesteps", sampling, process)
    # float32 whatever the default is: half the precision would miss most of a table's timesteps.
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32}
    drawn["device"] = device if generator is None else generator.device
    location, scale = sampling.location_or_default, sampling.scale_or_default
    match sampling.distribution:
        case "uniform":
            t = torch.rand(count, **drawn)
        case "mode":
            u = torch.rand(count, **drawn)
            t = 1.0 - u - scale * ((math.pi * u / 2).cos().square() - 1.0 + u)
        case _:
            normal = location + scale * torch.randn(count, **drawn)
            t = karras_time(normal.exp()) if sampling.distribution == "log_normal" else normal.sigmoid()
    return moved(process.on_grid(shift_times(t.clamp(0.0, 1.0), sampling.shift).clamp(*process.t_range)), device)


def check_sampling(owner: str, sampling: TimestepSampling, process: DiffusionProcess) -> None:
    """Raise ConfigurationError for a distribution that the process cannot be trained with."""
    if sampling.distribution == "log_normal" and process.schedule != "edm":
        raise refusal(owner, "schedule", "edm for log_normal noise levels", process.schedule)

"""Average velocities of a flow, with which one to four steps draw a sample.

    x_s = x_t - h u(x_t, t, h),   h = t - s,   u: mean of the velocity v = eps - x0 along the path between s and t
    MeanFlow   u(x_t, t, h) = v - h (v d/dx + d/dt + d/dh) u(x_t, t, h)
    shortcut   u(x_t, t, h) = (u(x_t, t, h/2) + u(x_t - h/2 u(x_t, t, h/2), t - h/2, h/2)) / 2

Both equations are trained with a right side that gets no gradient, on a share of each batch. The other rows have an
interval of length 0 (MeanFlow) or of the shortest length (shortcut), whose target is v. The derivative of MeanFlow is
computed in forward mode, by one more pass over its rows.

Costs: about two evaluations of the network without gradients on the share of the rows with intervals.
Source: Geng et al. (2025), https://arxiv.org/abs/2505.13447; Frans et al. (2024), https://arxiv.org/abs/2410.12557,
    without the limits of 4 on values that the authors' code adds.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_efficient.errors import check_number, checks_types, refusal
from lit_efficient.losses.diffusion import per_sample

AverageVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Noisy data x [B, ...], times t [B] and lengths h [B] of intervals from t - h to t, to average velocities [B, ...]."""


@checks_types
@dataclass(frozen=True)
class MeanFlow:
    """Settings of MeanFlow.

    Args:
        interval_share: Share of the rows of a batch with an interval longer than 0, in (0, 1].
        guidance_mix: Share of the guidance that is computed from the conditional prediction instead of the data, in
            [0, 1): kappa of the paper. It costs one more evaluation of the network.
        power: Exponent p of the weight (error + offset)^-p of a row, at least 0; the error is summed over its elements.
            0 is the squared error without a weight, averaged over the elements.
        offset: Offset of the weight, above 0.
    """

    interval_share: float = 0.25
    guidance_mix: float = 0.0
    power: float = 1.0
    offset: float = 0.01

    def __post_init__(self) -> None:
        check_number("MeanFlow", "interval_share", self.interval_share, above=0, most=1)
        check_number("MeanFlow", "guidance_mix", self.guidance_mix, least=0, below=1)
        check_number("MeanFlow", "power", self.power, least=0)
        check_number("MeanFlow", "offset", self.offset, above=0)


@checks_types
@dataclass(frozen=True)
class Shortcut:
    """Settings of shortcut models.

    Args:
        bootstrap_share: Share of the rows of a batch whose target comes from two steps of half the length, in (0, 1].
        finest: Number of the shortest steps from noise to data, a power of 2 and at least 2.
    """

    bootstrap_share: float = 0.25
    finest: int = 128

    def __post_init__(self) -> None:
        check_number("Shortcut", "bootstrap_share", self.bootstrap_share, above=0, most=1)
        check_number("Shortcut", "finest", self.finest, least=2, whole=True)
        if self.finest & (self.finest - 1):
            raise refusal("Shortcut", "finest", "a power of 2", self.finest)


def interval_rows(count: int, share: float) -> slice:
    """Return the last rows of a batch of ``count`` rows, a ``share`` of it, and at least one."""
    return slice(count - max(1, round(count * share)), count)


def mean_flow_times(first: Tensor, second: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return times and lengths of intervals, [B] each: the later of two times, and their distance in the last rows.

    Args:
        first: Times, [B].
        second: Times, [B].
        share: Share of the rows with an interval. The length of the others is 0.
    """
    t = torch.maximum(first, second)
    length = t - torch.minimum(first, second)
    length[: interval_rows(len(t), share).start] = 0.0
    return t, length


def shortcut_times(t: Tensor, share: float, finest: int) -> tuple[Tensor, Tensor]:
    """Return times and lengths of steps, [B] each, on the grids of 1, 2, 4 ... ``finest`` equal steps.

    The last rows get steps of the lengths 1, 1/2 ... 2 / ``finest``, which are equally frequent, at random places. The
    others get a step of the length 1 / ``finest``, and their time is rounded up to its grid.

    Args:
        t: Times, [B].
        share: Share of the rows with longer steps.
        finest: Number of the shortest steps, a power of 2.
    """
    rows = interval_rows(len(t), share)
    count = rows.stop - rows.start
    sections = 2.0 ** torch.randint(finest.bit_length() - 1, (count,), device=t.device)
    place = (torch.rand(count, device=t.device) * sections).floor() + 1.0
    flow = (t[: rows.start] * finest).ceil().clamp(1, finest) / finest
    return torch.cat([flow, place / sections]), torch.cat([torch.full_like(flow, 1.0 / finest), 1.0 / sections])


def total_derivative(u: AverageVelocity, x: Tensor, t: Tensor, h: Tensor, v: Tensor) -> Tensor:
    """Return the derivative of u(x, t, h) along the path that ends at t - h, without gradient: [B, ...].

    Attention is computed by PyTorch's own operations, because fused kernels have no derivative in forward mode.

    Args:
        u: The network.
        x: Noisy data, [B, ...].
        t: Times, [B].
        h: Lengths of the intervals, [B].
        v: Velocities dx/dt, [B, ...].
    """
    _load_derivatives()
    ones = torch.ones_like(t)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        output = u(*(forward_ad.make_dual(value, slope) for value, slope in ((x, v), (t, ones), (h, ones))))
        derivative = forward_ad.unpack_dual(output).tangent
    if derivative is None:
        return torch.zeros_like(x)
    return derivative


@cache
def _load_derivatives() -> None:
    """Let PyTorch load its rules of derivatives, without its warning that it uses its own deprecated functions."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def mean_flow_target(u: AverageVelocity, x: Tensor, t: Tensor, h: Tensor, v: Tensor) -> Tensor:
    """Return MeanFlow's target of u(x, t, h), without gradient: [B, ...]. Arguments as in `total_derivative`."""
    return v - per_sample(h, v) * total_derivative(u, x, t, h, v)


@torch.no_grad()
def shortcut_target(u: AverageVelocity, x: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Return the mean of the velocities of two steps of half the length, without gradient: [B, ...].

    Args:
        u: The network.
        x: Noisy data, [B, ...].
        t: Times, [B].
        h: Lengths of the whole steps, [B].
    """
    half = h / 2
    first = u(x, t, half)
    second = u(x - per_sample(half, x) * first, t - half, half)
    return (first + second) / 2


def error_weight(error: Tensor, power: float, offset: float) -> Tensor:
    """Return the weight ``(error + offset) ** -power`` of each row's summed squared error [B], without gradient."""
    return (error.detach() + offset) ** -power


def average_velocity_sample(u: AverageVelocity, noise: Tensor, times: Tensor) -> Tensor:
    """Go from noise to data by a step of each interval, and return the data, [B, ...].

    Args:
        u: The network.
        noise: Standard normal noise, [B, ...].
        times: Decreasing times from 1 to 0, [steps + 1].
    """
    x = noise
    for now, then in pairwise(times.to(noise.device)):
        x = x - (now - then) * u(x, now.expand(len(x)), (now - then).expand(len(x))).to(x.dtype)
    return x

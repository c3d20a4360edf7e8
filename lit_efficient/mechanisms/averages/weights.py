"""Averages of weights as functions of tensors: decays, the one update that all share, profiles and their synthesis.

    average <- average + (1 - decay) (weights - average),    decay = min(d, 1 - (1 + n)^-power)    (inverse gamma)
    power-function profile at time T:  p(t) = (g + 1) t^g / T^(g + 1),  reached by  decay = (1 - 1 / T)^(g + 1)

Nothing here knows of Lightning. Averages have at least the precision of float32: in bfloat16 one of decay 0.9999 never
moves.

Source: Karras et al. (2024), https://arxiv.org/abs/2312.02696 (profiles, post-hoc synthesis); ema-pytorch, diffusers
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_efficient.declaration import held
from lit_efficient.errors import check_number
from lit_efficient.internals.torch_foreach import foreach_copy_, foreach_lerp_
from lit_efficient.surgery import is_sharded, local

_CHUNK = 2**24  # elements that are converted at once on a GPU where formats differ: few launches count there
_ROWS = 2**18  # as many on the CPU, where a cache counts


def decay_at(step: int, decay: float, warmup: str | None = "inverse_gamma", power: float = 2 / 3) -> float:
    """Decay of an exponential average, as in ema-pytorch, timm and diffusers.

    Args:
        step: Optimizer steps since the first update; that one (0) copies the weights: its decay is 0.
        decay: The decay that is reached in the end, in [0, 1).
        warmup: ``inverse_gamma``: 1 - (1 + step)^-power; ``tf``: (1 + step) / (10 + step); ``None``: ``decay`` at once.
        power: Exponent of ``inverse_gamma``: 2/3 for a million steps and more, 3/4 for fewer.
    """
    if step <= 0:
        return 0.0
    if warmup == "inverse_gamma":
        return min(decay, 1 - (1 + step) ** -power)
    if warmup == "tf":
        return min(decay, (1 + step) / (10 + step))
    return decay


def power_decay(step: int, gamma: float) -> float:
    """Decay of update number ``step`` >= 1 under which the average has the power-function profile of ``gamma``."""
    return (1 - 1 / step) ** (gamma + 1)


def position_weights(count: int, kind: str = "uniform") -> list[float]:
    """Weights of ``count`` checkpoints, oldest first, that add up to 1.

    Args:
        count: Number of checkpoints, at least 1.
        kind: ``uniform``; ``linear``: in proportion to 1, 2, ..., count; ``exponential``: each half of the next one.
    """
    raw = {"uniform": lambda i: 1.0, "linear": lambda i: i + 1.0, "exponential": lambda i: 2.0 ** (i + 1 - count)}[kind]
    total = math.fsum(raw(i) for i in range(count))
    return [raw(i) / total for i in range(count)]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU: those there as they are, copies of a GPU's after one wait for all of its own.

    The copies lie in pinned memory, which torch keeps for the next ones.
    """
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    return copies


@torch.no_grad()
def update_(averages: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Move ``averages`` towards ``weights`` by 1 - decay, in place and in one pass over memory.

    Shards of DTensors are updated where they are; weights are of any floating-point format, on any device.
    """
    averages, weights = [local(t) for t in averages], [local(t.detach()) for t in weights]
    if decay == 0:
        onto_host = all(average.device.type == "cpu" for average in averages)
        foreach_copy_(averages, on_host(weights) if onto_host else weights)
        return
    alike = [(a, w) for a, w in zip(averages, weights) if a.dtype == w.dtype and a.device == w.device]
    if alike:
        foreach_lerp_([a for a, _ in alike], [w for _, w in alike], 1 - decay)
    if len(alike) < len(averages):
        others = [(a, w) for a, w in zip(averages, weights) if a.dtype != w.dtype or a.device != w.device]
        held = [(a, w) for a, w in others if a.device.type == "cpu"]
        for (a, _), w in zip(held, on_host([w for _, w in held])):
            for part, converted in _converted(a, w):
                part.lerp_(converted, 1 - decay)
        for chunk in _chunks(pair for pair in others if pair[0].device.type != "cpu"):
            copies = [w.to(a.device, a.dtype) for a, w in chunk]
            foreach_lerp_([a for a, _ in chunk], copies, 1 - decay)


def _converted(average: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both, those of the weights in the average's format: so many that they are still in the cache."""
    rows = max(1, _ROWS * len(average) // max(1, average.numel())) if average.ndim else 0
    parts = zip(average.split(rows), weights.split(rows)) if rows else [(average, weights)]
    return ((part, own.to(average.dtype)) for part, own in parts)


def _chunks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Groups of about ``_CHUNK`` elements, so that a converted copy of the whole network never exists."""
    chunk: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in pairs:
        chunk.append(pair)
        elements += pair[0].numel()
        if elements >= _CHUNK:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


@torch.no_grad()
def weighted_mean(states: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Mean of lists of tensors of the same shapes, in float32 at least, without a stacked copy; weights add up to 1."""
    mean = [torch.full_like(t, -0.0, dtype=precise(t.dtype)) for t in states[0]]  # 0.0 - 0.0 would be 0.0
    for state, weight in zip(states, weights, strict=True):
        for m, t in zip(mean, state, strict=True):
            for part, converted in _converted(local(m), local(t)):
                part.add_(converted, alpha=weight)
    return mean


def averageable(module: nn.Module, trainable_only: bool = True) -> dict[str, nn.Parameter]:
    """Parameters that an average shadows, by name: tied ones once, quantised ones never.

    ``trainable_only`` leaves out what does not require a gradient, unless it is frozen for now only (see
    :func:`lit_efficient.mechanisms.blocks.freezing.hold`). Optimizers are not asked: many hold the frozen parameters,
    too.
    """
    later = held(module)
    found = {}
    for name, p in module.named_parameters():
        if not (p.is_floating_point() or p.is_complex()):
            continue
        plain = type(p) is nn.Parameter or hasattr(p, "to_local")  # other classes hold packed or quantised weights
        if p.requires_grad or name in later or (plain and not trainable_only):
            found[name] = p
    return found


def precise(dtype: torch.dtype) -> torch.dtype:
    """The format of an average: float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def add_share(total: Tensor, tensor: Tensor, share: float, first: bool) -> None:
    """Add ``share`` times a tensor, in pieces, as torch converts a whole one; put the ``first`` down, -0.0 as it is."""
    room = torch.empty(min(tensor.numel(), _ROWS), dtype=total.dtype)  # what is made anew each time fragments the heap
    for sums, piece in zip(total.view(-1).split(_ROWS), tensor.detach().reshape(-1).split(_ROWS)):
        part = room[: len(piece)].copy_(piece)
        sums.copy_(part.mul_(share)) if first else sums.add_(part, alpha=share)


def whole(tensor: Any) -> Tensor:
    """All of a DTensor, gathered by all its processes and moved to the CPU, or the tensor itself.

    A DTensor must not be pickled as it is: the file would hold one shard, without a word.
    """
    tensor = tensor.detach()  # a parameter, while an average stands in the module
    return tensor.full_tensor().cpu() if is_sharded(tensor) else tensor


def placed_like(tensor: Tensor, like: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
    """A copy of ``tensor`` of the format ``dtype``, on ``device`` or that of ``like``, and sharded as ``like`` is."""
    copied = tensor.detach().to(device or like.device, dtype, copy=True)
    if is_sharded(like) and not is_sharded(copied):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(copied, like.device_mesh, like.placements)
    return copied


def gamma_of(sigma_rel: float) -> float:
    """Exponent of the profile whose standard deviation is ``sigma_rel`` times the length of the run.

    The largest real root of g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2) = 0.

    Raises:
        ConfigurationError: Unless 0 < sigma_rel < sqrt(1/12), the width of a uniform average.
    """
    check_number("power-function average", "sigma_rel", sigma_rel, above=0, below=12**-0.5)
    roots = np.roots([1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2])
    return float(roots.real.max())


def synthesis_weights(
    steps: Sequence[int], sigma_rels: Sequence[float], target_step: int, target_sigma_rel: float
) -> list[float]:
    """Weights of stored averages whose sum comes closest to an average of another width, as a function of time.

    Args:
        steps: Step at which each stored average was taken.
        sigma_rels: Width of each stored average.
        target_step: Step of the average to be built; stored averages of later steps must be left out.
        target_sigma_rel: Its width.

    Returns:
        One weight for each stored average; they add up to 1 and may be negative.
    """
    time = np.asarray(steps, dtype=np.float64) / target_step
    gamma = np.array([gamma_of(sigma_rel) for sigma_rel in sigma_rels])
    matrix = _inner_product(time[:, None], gamma[:, None], time[None], gamma[None])
    target = _inner_product(time, gamma, 1.0, gamma_of(target_sigma_rel))
    # Least squares with a cut-off: profiles of neighbouring widths are nearly dependent.
    solved = np.linalg.lstsq(matrix, target, rcond=1e-12)[0]
    # The sum falls short of 1 by the early steps that no snapshot tells apart. To scale all up for it moves weight to
    # late steps, which for wide averages is worse than to give it to the oldest snapshot.
    oldest = solved.copy()
    oldest[np.lexsort((gamma, time))[0]] += 1.0 - solved.sum()
    late = _tail_product(time[:, None], gamma[:, None], time[None], gamma[None])
    wanted = _tail_product(time, gamma, 1.0, gamma_of(target_sigma_rel))
    choices = (solved / solved.sum(), oldest)
    return [float(weight) for weight in min(choices, key=lambda c: c @ late @ c - 2 * c @ wanted)]


def _tail_product(time_a: Any, gamma_a: Any, time_b: Any, gamma_b: Any) -> Any:
    """Integral of the product of what two profiles hold after a time: by it weights that walk at random differ."""
    first, a, b = np.minimum(time_a, time_b), gamma_a + 1, gamma_b + 1
    at_a, at_b = (first / time_a) ** a, (first / time_b) ** b
    return first * (1 - at_a / (a + 1) - at_b / (b + 1) + at_a * at_b / (a + b + 1))


def _inner_product(time_a: Any, gamma_a: Any, time_b: Any, gamma_b: Any) -> Any:
    """Integral of the product of two profiles over time."""
    # Ratios at most 1 to powers above 0: t^(g+1) itself would underflow for early snapshots of narrow widths.
    first = np.minimum(time_a, time_b)
    ratio = (first / time_a) ** gamma_a * (first / time_b) ** gamma_b
    return (gamma_a + 1) * (gamma_b + 1) * ratio * first / (time_a * time_b * (gamma_a + gamma_b + 1))

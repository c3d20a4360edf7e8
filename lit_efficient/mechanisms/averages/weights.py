"""Averages of weights as functions of tensors: decay schedules, the update, profiles and their synthesis.

    average <- average + (1 - decay) (weights - average),    decay = min(d, 1 - (1 + n)^-power)    (inverse gamma)
    power-function profile at time T:  p(t) = (g + 1) t^g / T^(g + 1),  reached by  decay = (1 - 1 / T)^(g + 1)

Averages have at least the precision of float32, because a bfloat16 average with decay 0.9999 never changes: the update
is smaller than half the distance between two neighbouring numbers.

Source: Karras et al. (2024), https://arxiv.org/abs/2312.02696 (profiles, post-hoc synthesis); ema-pytorch, diffusers
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_efficient.declaration import held
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.torch_shards import is_sharded, local

Numbers = np.ndarray | float

# Elements that are converted to the average's dtype at once: many on a GPU for few launches, fewer on a
# CPU for pieces that fit its cache.
_GPU_CHUNK = 2**24
_CPU_CHUNK = 2**18


def decay_at(step: int, decay: float, warmup: str | None = "inverse_gamma", power: float = 2 / 3) -> float:
    """Return the decay of an exponential average, as in ema-pytorch, timm and diffusers.

    Args:
        step: Optimizer steps since the first update. The first update (0) copies the weights: its decay is 0.
        decay: Final decay, in [0, 1).
        warmup: ``inverse_gamma``: 1 - (1 + step)^-power; ``tf``: (1 + step) / (10 + step); ``None``: no warm-up.
        power: Exponent of ``inverse_gamma``: 2/3 for runs of a million steps or more, 3/4 for shorter ones.
    """
    if step <= 0:
        return 0.0
    if warmup == "inverse_gamma":
        return min(decay, 1 - (1 + step) ** -power)
    if warmup == "tf":
        return min(decay, (1 + step) / (10 + step))
    return decay


def power_decay(step: int, gamma: float) -> float:
    """Return the decay of update ``step`` >= 1 that gives the average the power-function profile ``gamma``."""
    return (1 - 1 / step) ** (gamma + 1)


def position_weights(count: int, kind: str = "uniform") -> list[float]:
    """Return the weights of ``count`` checkpoints in an average, oldest first. They add up to 1.

    Args:
        count: Number of checkpoints, at least 1.
        kind: ``uniform``; ``linear``: in proportion to 1, 2, ..., count; ``exponential``: each half of the next one.
    """
    if kind == "uniform":
        raw = [1.0] * count
    elif kind == "linear":
        raw = [i + 1.0 for i in range(count)]
    else:
        assert kind == "exponential", kind
        raw = [2.0 ** (i + 1 - count) for i in range(count)]
    total = math.fsum(raw)
    return [weight / total for weight in raw]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU: CPU tensors themselves, and copies of GPU tensors after one wait per GPU.

    The copies are in pinned memory, which torch reuses for later copies.
    """
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    return copies


@torch.no_grad()
def update_(averages: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Move ``averages`` towards ``weights`` by the fraction 1 - decay, in place and in one pass over memory.

    Args:
        averages: Tensors to update. Shards of DTensors are updated locally.
        weights: Tensors of the same shapes, of any floating-point dtype, on any device.
        decay: Fraction of the average that stays, in [0, 1].
    """
    averages = [local(average) for average in averages]
    weights = [local(weight.detach()) for weight in weights]
    if decay == 0:
        if all(average.device.type == "cpu" for average in averages):
            weights = on_host(weights)
        for average, weight in zip(averages, weights):
            average.copy_(weight)
        return
    lerp = get_ema_multi_avg_fn(decay)  # one kernel for many tensors
    matching: list[tuple[Tensor, Tensor]] = []
    on_cpu: list[tuple[Tensor, Tensor]] = []  # pairs of different dtypes or devices, by the average's device
    on_gpu: list[tuple[Tensor, Tensor]] = []
    for average, weight in zip(averages, weights):
        if average.dtype == weight.dtype and average.device == weight.device:
            matching.append((average, weight))
        elif average.device.type == "cpu":
            on_cpu.append((average, weight))
        else:
            on_gpu.append((average, weight))
    if matching:
        lerp([a for a, _ in matching], [w for _, w in matching], 0)
    for (average, _), weight in zip(on_cpu, on_host([w for _, w in on_cpu])):
        for part, converted in _converted(average, weight):
            part.lerp_(converted, 1 - decay)
    for chunk in _chunks(on_gpu):
        copies = [weight.to(average.device, average.dtype) for average, weight in chunk]
        lerp([average for average, _ in chunk], copies, 0)


def _converted(average: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of both tensors, the weights converted to the average's dtype, small enough for the CPU's cache."""
    if not average.ndim:
        yield average, weights.to(average.dtype)
        return
    rows = max(1, _CPU_CHUNK * len(average) // max(1, average.numel()))
    for part, piece in zip(average.split(rows), weights.split(rows)):
        yield part, piece.to(average.dtype)


def _chunks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield groups of pairs of about ``_GPU_CHUNK`` elements, so that the whole network is never converted at once."""
    chunk: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in pairs:
        chunk.append(pair)
        elements += pair[0].numel()
        if elements >= _GPU_CHUNK:
            yield chunk
            chunk = []
            elements = 0
    if chunk:
        yield chunk


@torch.no_grad()
def weighted_mean(states: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Return the weighted mean of lists of tensors of the same shapes, in float32 at least, without stacking them.

    Args:
        states: Lists of tensors.
        weights: Weight of each list. They add up to 1.
    """
    # Sums begin at -0.0, so that a mean of negative zeros stays -0.0: 0.0 + (-0.0) is 0.0.
    mean = [torch.full_like(t, -0.0, dtype=precise(t.dtype)) for t in states[0]]
    for state, weight in zip(states, weights, strict=True):
        for m, t in zip(mean, state, strict=True):
            for part, converted in _converted(local(m), local(t)):
                part.add_(converted, alpha=weight)
    return mean


def averageable(module: nn.Module, trainable_only: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters that are averaged, by name. Tied parameters come once, quantised ones never.

    Args:
        module: The module.
        trainable_only: Leave out parameters that do not require a gradient, unless they are frozen only for now (see
            :func:`lit_efficient.mechanisms.blocks.freezing.hold`). The optimizer is not asked, because many optimizers
            hold frozen parameters as well.
    """
    frozen_for_now = held(module)
    found = {}
    for name, p in module.named_parameters():
        if not (p.is_floating_point() or p.is_complex()):
            continue
        plain = type(p) is nn.Parameter or hasattr(p, "to_local")  # other classes hold packed or quantised weights
        if p.requires_grad or name in frozen_for_now or (plain and not trainable_only):
            found[name] = p
    return found


def tracked_weights(module: nn.Module, who: str, trainable_only: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters of :func:`averageable` for the technique ``who``.

    Raises:
        ConfigurationError: If there are none.
    """
    tracked = averageable(module, trainable_only)
    if not tracked:
        raise ConfigurationError(
            f"{who}: no parameter of {type(module).__name__} trains, so that nothing can be averaged: unfreeze some, "
            f"or leave {who} out"
        )
    return tracked


@torch.no_grad()
def fingerprint(weights: Sequence[Tensor]) -> list[float]:
    """Return a number for each tensor that changes if its values change.

    Tensors of whole numbers, such as the packed weights of a quantised base, do not train and are left out.
    """
    norms: dict[torch.device, list[Tensor]] = {}
    for weight in weights:
        own = local(weight)
        if own.is_floating_point() or own.is_complex():
            norms.setdefault(own.device, []).append(torch.linalg.vector_norm(own))
    found: list[float] = []
    for numbers in norms.values():  # one wait for each device
        found += torch.stack([number.double() for number in numbers]).tolist()
    return found


def check_unchanged(who: str, before: Sequence[float], weights: Sequence[Tensor]) -> None:
    """Raise an error if other code has written to the weights that ``who`` evaluates.

    Raises:
        ConfigurationError: If the fingerprint differs from ``before``. NaN equals NaN.
    """
    now = fingerprint(weights)
    if repr(now) != repr(list(before)):
        raise ConfigurationError(
            f"{who} evaluates other weights than those that train, and other code has written to them during the "
            "evaluation, so that neither set can be put back: two callbacks that exchange weights undo each other. "
            f"Leave one of them out, or read the weights of {who} in your callback instead of writing to the module"
        )


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average of weights of ``dtype``: float32, or a wider dtype."""
    return torch.promote_types(dtype, torch.float32)


def add_share(total: Tensor, tensor: Tensor, share: float, first: bool) -> None:
    """Add ``share`` times ``tensor`` to ``total``, in place and in pieces.

    Args:
        total: Contiguous tensor that collects the sum.
        tensor: Tensor of the same shape, of any dtype.
        share: Factor.
        first: Overwrite ``total`` instead of adding to it. This keeps negative zeros.
    """
    buffer = torch.empty(min(tensor.numel(), _CPU_CHUNK), dtype=total.dtype)  # reused: new ones would fragment the heap
    for sums, piece in zip(total.view(-1).split(_CPU_CHUNK), tensor.detach().reshape(-1).split(_CPU_CHUNK)):
        part = buffer[: len(piece)].copy_(piece)
        if first:
            sums.copy_(part.mul_(share))
        else:
            sums.add_(part, alpha=share)


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's full tensor, gathered on the CPU by all processes, or any other tensor itself.

    A pickled DTensor would put one shard into the file without an error.
    """
    tensor = tensor.detach()  # it is a parameter while the average is in the module
    if is_sharded(tensor):
        return tensor.full_tensor().cpu()  # type: ignore[attr-defined]  # a DTensor
    return tensor


def placed_like(tensor: Tensor, like: Any, dtype: torch.dtype, device: str | torch.device | None = None) -> Tensor:
    """Return a copy of ``tensor`` in ``dtype``, on ``device`` or the device of ``like``, and sharded as ``like``."""
    copied = tensor.detach().to(device or like.device, dtype, copy=True)
    if is_sharded(like) and not is_sharded(copied):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(copied, like.device_mesh, like.placements)
    return copied


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of the profile whose standard deviation is ``sigma_rel`` times the length of the run.

    It is the largest real root of g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2) = 0.

    Raises:
        ConfigurationError: Unless 0 < sigma_rel < sqrt(1/12), the width of a uniform average.
    """
    check_number("power-function average", "sigma_rel", sigma_rel, above=0, below=12**-0.5)
    roots = np.roots([1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2])
    return float(roots.real.max())


def synthesis_weights(
    steps: Sequence[int], sigma_rels: Sequence[float], target_step: int, target_sigma_rel: float
) -> list[float]:
    """Return the weights of stored averages whose sum comes closest to an average of another width.

    The distance is that of the profiles as functions of time.

    Args:
        steps: Step at which each stored average was taken.
        sigma_rels: Width of each stored average.
        target_step: Step of the wanted average. Stored averages of later steps must be left out.
        target_sigma_rel: Width of the wanted average.

    Returns:
        One weight for each stored average. They add up to 1 and may be negative.
    """
    time = np.asarray(steps, dtype=np.float64) / target_step
    gamma = np.array([gamma_of(sigma_rel) for sigma_rel in sigma_rels])
    matrix = _inner_product(time[:, None], gamma[:, None], time[None], gamma[None])
    target = _inner_product(time, gamma, 1.0, gamma_of(target_sigma_rel))
    # Least squares with a cut-off, because profiles of neighbouring widths are nearly linearly dependent.
    solved = np.linalg.lstsq(matrix, target, rcond=1e-12)[0]
    # The sum is below 1 because snapshots cannot distinguish the earliest steps. Scaling all weights moves weight to
    # late steps. Giving the rest to the oldest snapshot is better for wide averages. The better of the two is used.
    rest_to_oldest = solved.copy()
    rest_to_oldest[np.lexsort((gamma, time))[0]] += 1.0 - solved.sum()
    late = _tail_product(time[:, None], gamma[:, None], time[None], gamma[None])
    wanted = _tail_product(time, gamma, 1.0, gamma_of(target_sigma_rel))
    choices = (solved / solved.sum(), rest_to_oldest)
    best = min(choices, key=lambda weights: weights @ late @ weights - 2 * weights @ wanted)
    return [float(weight) for weight in best]


def _tail_product(time_a: Numbers, gamma_a: Numbers, time_b: Numbers, gamma_b: Numbers) -> np.ndarray:
    """Return the integral over time of the product of the two profiles' tails.

    The tail at a time is the weight that a profile gives to later steps. The expected squared distance between two
    averages of weights that move as a random walk is an integral of this kind.
    """
    first = np.minimum(time_a, time_b)
    a = gamma_a + 1
    b = gamma_b + 1
    at_a = (first / time_a) ** a
    at_b = (first / time_b) ** b
    return first * (1 - at_a / (a + 1) - at_b / (b + 1) + at_a * at_b / (a + b + 1))


def _inner_product(time_a: Numbers, gamma_a: Numbers, time_b: Numbers, gamma_b: Numbers) -> np.ndarray:
    """Return the integral over time of the product of two profiles."""
    # Ratios are at most 1, so their powers are safe. t^(g+1) would underflow for early snapshots of narrow widths.
    first = np.minimum(time_a, time_b)
    ratio = (first / time_a) ** gamma_a * (first / time_b) ** gamma_b
    return (gamma_a + 1) * (gamma_b + 1) * ratio * first / (time_a * time_b * (gamma_a + gamma_b + 1))

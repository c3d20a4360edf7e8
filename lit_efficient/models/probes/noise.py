"""Weights in the place of initial ones that hide what a network computes: zeros, closed gates, small matrices."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_fsdp import is_in_flat_vector, sharded_modules
from lit_efficient.surgery import is_sharded

# Gates and biases are no longer. Some strategies keep all weights of a layer in one vector.
_LONGEST_VECTOR = 1 << 20
_LARGEST = 1e3  # weight of an enlarged matrix, so that float16 holds it
# Parameters, and functions that return the values in the place of those in a tensor.
Values = list[tuple[Tensor, Callable[[Tensor], Tensor]]]


def gathers_weights(network: nn.Module) -> bool:
    """Return whether a strategy gathers weights for each call: torch's FSDP, of either version, or DeepSpeed's ZeRO 3.

    They free the weights at the end of a backward pass, in the middle of the step that runs this test.
    """
    marks = ("reshard", "summon_full_params")  # methods of FSDP2 and FSDP
    by_parts = any(hasattr(part, mark) for part in network.modules() for mark in marks)
    return by_parts or any(is_sharded(p) or hasattr(p, "ds_id") for p in network.parameters())


def noise_for_zeros(network: nn.Module) -> Values:
    """Return noise for the parameters that are entirely zero.

    Zero weights of a new network may hide paths between tokens, in all of its layers or in one kind of them.
    """
    return [(p, _small) for p in network.parameters() if _is_plain(p) and not _held(p).any()]


def noise_for_vectors(network: nn.Module) -> Values:
    """Return noise for the parameters with at most one axis.

    They are gates, biases, decays and scales. Some close a path at first: a sigmoid of a large negative number.
    """
    vectors = (p for p in network.parameters() if _is_plain(p) and len(_shape(p)) < 2)
    return [(p, _of_size_one) for p in vectors if _held(p).numel() <= _LONGEST_VECTOR]


@contextmanager
def replaced(values: Values) -> Iterator[None]:
    """Run the body with other values in some parameters, or in the shards of them that this process holds."""
    held = [_held(p) for p, _ in values]
    own = [tensor.clone() for tensor in held]
    for tensor, (_, value) in zip(held, values, strict=True):
        tensor.copy_(value(tensor))  # detached tensors, so that this is not recorded
    try:
        yield
    finally:
        for tensor, before in zip(held, own, strict=True):
            tensor.copy_(before)


@contextmanager
def enlarged(network: nn.Module) -> Iterator[None]:
    """Run the body with small matrices enlarged to a root mean square of about ``1 / sqrt(width)``.

    Small weights hide paths between tokens, which training may widen. The factors are powers of two, so that all
    weights are restored exactly without a copy. Quantised weights stay as they are. FSDP's vectors of all weights of
    some layers count as one matrix.
    """
    matrices = [p for p in network.parameters() if _is_plain(p) and _width(p)]
    held = [_held(p) for p in matrices]
    exponents = []
    if held:
        squares = [_norm(tensor, 2) for tensor in held]
        largest = [_norm(tensor, math.inf) for tensor in held]
        for p, tensor, norm, most in zip(
            matrices, held, torch.stack(squares).tolist(), torch.stack(largest).tolist(), strict=True
        ):
            exponents.append(_exponent(norm / tensor.numel() ** 0.5, most, _width(p)))
    for tensor, exponent in zip(held, exponents, strict=True):
        tensor.mul_(2.0**exponent)
    try:
        yield
    finally:
        for tensor, exponent in zip(held, exponents, strict=True):
            tensor.mul_(2.0**-exponent)


def _norm(tensor: Tensor, order: float) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)  # float64 is not computed in float32
    return torch.linalg.vector_norm(tensor, order, dtype=wide).float()


def _exponent(size: float, largest: float, width: int) -> int:
    """Return the power of two by which weights of a root mean square ``size`` are multiplied."""
    if not 0 < size < math.inf or not largest < math.inf:
        return 0
    wanted = math.log2(width**-0.5 / size)
    return max(0, math.floor(min(wanted, math.log2(_LARGEST / largest), 100.0)))


def shards_again(network: nn.Module) -> Callable[[], None]:
    """Return a function that frees the weights that have been gathered since this call.

    Some parts keep them after a call, and would not see that the shards have changed.
    """
    parts = [part for part in sharded_modules(network) if _is_in_shards(part)]
    parameters: list[Any] = [p for p in network.parameters() if hasattr(p, "ds_tensor") and not p.numel()]

    def free() -> None:
        for part in parts:
            part.reshard()
        for p in parameters:
            if p.numel():
                p.partition()

    return free


def _is_in_shards(part: Any) -> bool:
    inner = {id(p) for other in sharded_modules(part) if other is not part for p in other.parameters()}
    own = [p for p in part.parameters() if id(p) not in inner]
    return bool(own) and all(is_sharded(p) for p in own)


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter, or the shard of this process, holds one number for each weight."""
    local = _held(parameter)
    plain = type(local) in (nn.Parameter, Tensor) and not local.is_inference()
    return plain and local.is_floating_point() and local.numel() > 0 and has_values(local)


def _held(parameter: Tensor) -> Any:
    """Return the tensor, without gradients, that holds a parameter or the shard of this process."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local().detach()
    if not parameter.numel() and hasattr(parameter, "ds_tensor"):  # DeepSpeed's stage 3
        return parameter.ds_tensor.detach()
    # Not detach(): autograd would count changes, and refuse FSDP's views of the vector that holds all weights.
    return parameter.data


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _width(parameter: Any) -> int:
    """Return the number of columns of a matrix, and 0 for a vector."""
    shape = _shape(parameter)
    if len(shape) > 1:
        return shape[-1]
    return math.isqrt(parameter.numel()) if is_in_flat_vector(parameter) else 0


def _small(like: Tensor) -> Tensor:
    return torch.linspace(-0.1, 0.1, like.numel()).to(like).sin_().view_as(like)


def _of_size_one(like: Tensor) -> Tensor:
    return torch.arange(1, like.numel() + 1).mul(2.4).sin().to(like).view_as(like)

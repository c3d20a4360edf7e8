"""Noise in the place of initial weights that hide what a network computes: zeros, and gates that are closed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.surgery import is_sharded

# Gates and biases are no longer. Some strategies keep all weights of a layer in one vector.
_LONGEST_VECTOR = 1 << 20
Values = list[tuple[Tensor, Tensor]]  # tensors, and the values that replace theirs during a call


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
    noise = []
    for p in _plain_weights(network):
        if not p.any():
            noise.append((p, torch.linspace(-0.1, 0.1, p.numel()).to(p).sin_().view_as(p)))
    return noise


def noise_for_vectors(network: nn.Module) -> Values:
    """Return noise for the parameters with at most one axis.

    They are gates, biases, decays and scales. Some close a path at first: a sigmoid of a large negative number.
    """
    noise = []
    for p in _plain_weights(network):
        if p.ndim < 2 and p.numel() <= _LONGEST_VECTOR:
            noise.append((p, torch.arange(1, p.numel() + 1).mul(2.4).sin().to(p).view_as(p)))
    return noise


def _plain_weights(network: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that hold one number for each weight, and of sharded ones the shard of this process."""
    for p in network.parameters():
        local: Any = p.to_local() if hasattr(p, "to_local") else p
        plain = type(local) in (nn.Parameter, Tensor) and not local.is_inference()
        if plain and local.is_floating_point() and local.numel() and has_values(local):
            yield local.detach()


@contextmanager
def replaced(values: Values) -> Iterator[None]:
    """Run the body with other values in some tensors."""
    own = [tensor.clone() for tensor, _ in values]
    for tensor, value in values:
        tensor.copy_(value)  # detached tensors, so that this is not recorded
    try:
        yield
    finally:
        for (tensor, _), before in zip(values, own, strict=True):
            tensor.copy_(before)

"""Tensors without values, on whatever device, and what cannot be known of them. Checked with torch 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "like_real_ones",
]


@contextmanager
def like_real_ones() -> Iterator[None]:
    """Let fakes be moved with ``module.to`` and be copied with ``deepcopy``: ``torch._C._swap_tensor_impl``.

    torch refuses the first where weak references exist, and keeps some to each parameter itself.
    """
    swap = torch.utils.swap_tensors

    def swap_fakes(one: Tensor, other: Tensor) -> None:
        if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor)):
            return swap(one, other)
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        kinds = one.__class__, other.__class__
        other.__class__, one.__class__ = kinds
        torch._C._swap_tensor_impl(one, other)
        return None

    def copy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            alike = self.detach().clone()
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(alike, self.requires_grad) if parameter else alike
        return memo[id(self)]

    torch.utils.swap_tensors, FakeTensor.__deepcopy__ = swap_fakes, copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
        del FakeTensor.__deepcopy__

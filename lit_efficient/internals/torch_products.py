"""Matrix products of 16-bit matrices whose result is float32, without a pass that widens it.

cuBLAS sums such products in float32 and can write the sums. PyTorch offers this as ``out_dtype``, for CUDA only.
Elsewhere the product is rounded to 16 bits and widened. Checked with torch 2.13, on tensors without values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, mm_flop, shape_wrapper

from lit_efficient.internals.torch_as_cuda import kind_of


@shape_wrapper
def _addmm_flop(total: object, a: Any, b: Any, *_: object, out_shape: object = None, **__: object) -> int:
    """Count an ``addmm``. torch's formula fails if ``out_dtype`` is given, which is the fourth argument."""
    return int(mm_flop(a, b))


flop_registry[torch.ops.aten.addmm] = _addmm_flop

_ROWS = 16_384  # rows of a wide sum that are computed at a time where the product is rounded first


def product(a: Tensor, b: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return ``scale * a @ b`` in ``dtype``, for matrices of one dtype."""
    if writes_wide(a, dtype):
        if scale == 1:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(a.new_empty((), dtype=dtype), a, b, out_dtype=dtype, beta=0, alpha=scale)
    if scale == 1:
        return torch.mm(a, b).to(dtype)
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale).to(dtype)  # with beta 0 the sum is not read


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total + a @ b`` in ``dtype``. ``total`` has this dtype and is changed in place; None begins a sum."""
    if total is None:
        if a.dtype == dtype or writes_wide(a, dtype):
            return product(a, b, dtype)
        total = a.new_zeros(len(a), b.shape[1], dtype=dtype)
    if a.dtype == dtype:
        return torch.addmm(total, a, b, out=total)
    if writes_wide(a, dtype):
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    for rows, factor in zip(total.split(_ROWS), a.split(_ROWS)):
        rows.add_(factor @ b)
    return total


def writes_wide(a: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a product of matrices like ``a`` can be written in another dtype."""
    if a.dtype not in (torch.bfloat16, torch.float16) or dtype != torch.float32 or torch.is_grad_enabled():
        return False
    return kind_of(a.device) == "cuda" and torch.version.hip is None

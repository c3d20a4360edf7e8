"""The two products of a low-rank adapter as steps of the backward pass, with fewer passes over large tensors.

    forward    h = A x;  y <- y + s B h
    backward   dh = s B^T dy;  dB = s dy h^T;  dA = dh x^T;  dx <- dx + A^T dh

``x`` is stored for ``dA`` only, so that a frozen A (LoRA-FA) stores ``h`` alone. A and B are rounded to the dtype of
``x`` by one launch, and ``y`` is changed in place. The last product adds to the gradient that the frozen layer returns,
which autograd would do in a pass of its own. On a GPU ``dA`` and ``dB`` are written in float32. With adapters on all
linear layers of a block of 3B, the launches of both passes fall from 144 to 116
(``python -m benchmarks.block_counts``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.internals.torch_checkpoint import caches_results
from lit_efficient.internals.torch_operators import is_batched, transformed
from lit_efficient.internals.torch_optimizers import foreach_copy_
from lit_efficient.internals.torch_products import product
from lit_efficient.internals.torch_shards import is_sharded, is_wrapper
from lit_efficient.internals.torch_tensors import viewed
from lit_efficient.surgery import in_autocast_dtype


def is_differentiated_here(x: Tensor, a: Tensor) -> bool:
    """Return whether :func:`inner_product` and :func:`add_outer_product` can be used.

    Compilers fuse the plain operators themselves. Functional transforms and forward-mode derivatives need them.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return False
    if is_wrapper(x) or is_sharded(x) or is_sharded(a):
        return False
    if in_autocast_dtype(x) is not x:  # autocast would round x within the products, but not for their gradients
        return False
    narrow = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and torch.is_autocast_enabled(x.device.type))
    return x.dtype == a.dtype or (narrow and a.dtype == torch.float32)


def rounded(dtype: torch.dtype, *factors: Tensor) -> list[Tensor]:
    """Return copies of the factors in ``dtype``, without a gradient, or the factors themselves if they have it."""
    if all(factor.dtype == dtype for factor in factors):
        return [*factors]  # no other tensors of the same memory: techniques move the memory of parameters
    plain = [factor.detach() for factor in factors]
    made = [torch.empty_like(factor, dtype=dtype) for factor in plain]
    foreach_copy_(made, plain)
    return made


def inner_product(x: Tensor, a: Tensor, narrow: Tensor, owned: bool) -> tuple[Tensor, Tensor]:
    """Return ``x`` for the frozen layer, and ``A x``.

    Args:
        x: [..., in].
        a: The parameter A, [r, in].
        narrow: A in the dtype of ``x``.
        owned: The gradient that the frozen layer returns for ``x`` belongs to nobody else, and may be changed.
    """
    same, inner = _Inner.apply(x, a, narrow, owned)
    if not x.requires_grad:  # the frozen layer must not compute a gradient for it either
        return x, inner
    return same, inner


def add_outer_product(y: Tensor, inner: Tensor, b: Tensor, narrow: Tensor, scale: float, owned: bool) -> Tensor:
    """Return ``y + s B h``.

    Args:
        y: Output of the frozen layer, [..., out], in the dtype of ``inner``.
        inner: ``h``, [..., r].
        b: The parameter B, [out, r].
        narrow: B in the dtype of ``inner``.
        scale: ``s``.
        owned: ``y`` belongs to nobody else, and is changed in place.
    """
    in_place = owned and y.is_contiguous() and viewed(y) is None and not caches_results()
    return _Outer.apply(y, inner, b, narrow, scale, in_place)


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, narrow: Tensor, owned: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, a, narrow)
        ctx.set_materialize_grads(False)
        ctx.owned = owned
        ctx.shape = x.shape
        return x, F.linear(x, narrow)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, a, narrow = ctx.saved_tensors
        if dh is None:
            return dx, None, None, None
        if torch.is_grad_enabled():  # a second derivative follows
            narrow = a.to(narrow.dtype)
        rows = _rows(dh)
        da = None
        if ctx.needs_input_grad[1]:
            da = product(rows.mT, _rows(x), a.dtype)
        if not ctx.needs_input_grad[0]:
            return None, da, None, None
        if dx is None:
            total = rows @ narrow
        elif ctx.owned and not torch.is_grad_enabled() and not is_batched(dx):
            total = _rows(dx)
            torch.addmm(total, rows, narrow, out=total)  # counters of FLOPs do not know the in-place form
        else:
            total = torch.addmm(_rows(dx), rows, narrow)
        return total.view(ctx.shape), da, None, None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, inner: Tensor, b: Tensor, narrow: Tensor, scale: float, in_place: bool) -> Tensor:
        ctx.save_for_backward(inner, b, narrow)
        ctx.scale = scale
        if in_place:
            ctx.mark_dirty(y)
            total = y.view(-1, y.shape[-1])
            torch.addmm(total, _rows(inner), narrow.mT, alpha=scale, out=total)
            return y
        # The result must not be a view, because networks may change it in place.
        made = torch.empty_like(y, memory_format=torch.contiguous_format)
        torch.addmm(_rows(y), _rows(inner), narrow.mT, alpha=scale, out=made.view(-1, made.shape[-1]))
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inner, b, narrow = ctx.saved_tensors
        if torch.is_grad_enabled():
            narrow = b.to(inner.dtype)
        rows = _rows(dy)
        dh = db = None
        if ctx.needs_input_grad[1]:
            dh = product(rows, narrow, inner.dtype, ctx.scale).view_as(inner)
        if ctx.needs_input_grad[2]:
            db = product(rows.mT, _rows(inner), b.dtype, ctx.scale)
        return dy if ctx.needs_input_grad[0] else None, dh, db, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])

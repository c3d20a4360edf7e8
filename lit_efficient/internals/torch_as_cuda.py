"""Fake CPU tensors that stand in for CUDA tensors: they save the same tensors for the backward pass.

    rms_norm    on CUDA, one kernel saves input, weight and 1/rms [.., 1] in float32; a CPU uses several operations
    autocast    on CUDA, norms, softmax, sums and powers are computed in float32; a CPU does not change them

Kernels for the CPU are registered in torch's dispatcher. The dispatcher still decides where the fused kernel is used
(not for a weight of another dtype), and for which operators autocast only has kernels for CUDA. Checked with torch
2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lit_efficient.internals.torch_operators import transformed

__all__ = ["as_cuda", "kind_of"]

_STANDS: list[str] = []  # device types that fake CPU tensors stand for; a list, because torch.compile can read it
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
# From autocast's list for CUDA, https://docs.pytorch.org/docs/stable/amp.html: operators with float32 inputs or result.
_WIDENED = (
    *("rms_norm", "layer_norm", "native_layer_norm", "group_norm", "exp", "log", "log1p", "reciprocal", "rsqrt"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "logsumexp"),
)
_SUMMED = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod")


def kind_of(device: torch.device) -> str:
    """Return the type of a device, or the type that it stands for."""
    if _STANDS and device.type == "cpu":
        return "cuda"
    return device.type


@contextmanager
def as_cuda() -> Iterator[None]:
    """Context in which fake CPU tensors behave like CUDA tensors: ``_fused_rms_norm``, and the list of autocast."""
    library = torch.library.Library("aten", "IMPL")
    _STANDS.append("cuda")
    try:
        if hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("_fused_rms_norm", _fused_rms_norm, "AutogradCPU")
        for names, make in ((_WIDENED, _widened), (_SUMMED, _summed)):
            for name in names:
                if _has("AutocastCUDA", name) and not _has("AutocastCPU", name):
                    library.impl(name, make(_operator(name)), "AutocastCPU")
        yield
    finally:
        _STANDS.pop()
        library._destroy()


def _has(key: str, name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _operator(name: str) -> object:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _widened(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> object:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*(one.float() if _is_narrow(one) else one for one in args), **kwargs)

    return kernel


def _summed(operator: Any) -> Callable[..., object]:
    def kernel(*args: object, dtype: torch.dtype | None = None) -> object:
        given = {}
        if len(args) < len(operator._schema.arguments):  # otherwise dtype is positional
            given["dtype"] = torch.float32 if dtype is None and _is_narrow(args[0]) else dtype
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*args, **given)

    return kernel


def _is_narrow(one: object) -> bool:
    return isinstance(one, Tensor) and one.dtype in (torch.bfloat16, torch.float16)


def _fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    has_values = not isinstance(x, FakeTensor)
    if has_values or transformed():
        return _in_pieces(x, shape, weight, eps)
    out, scale = _RMSNorm.apply(x, weight, shape, eps)
    return out, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.shape = shape
        ctx.eps = eps
        kept = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
        scale = x.new_empty(kept, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        return torch.empty_like(x, memory_format=torch.contiguous_format), scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # on CUDA too, only the separate operations have a second derivative
            inputs = [one for one, needed in zip((x, weight), ctx.needs_input_grad) if needed]
            out, _ = _in_pieces(x, ctx.shape, weight, ctx.eps)
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None
        made = [torch.empty_like(one) if needed else None for one, needed in zip((x, weight), ctx.needs_input_grad)]
        return *made, None, None


def _in_pieces(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().mean([*range(-len(shape), 0)], keepdim=True)
    scale = (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * scale
    if weight is not None:
        out = out * weight
    return out.to(x.dtype), scale

"""CPU tensors without values that stand for CUDA's: what kernels keep there, and what autocast widens.

    rms_norm    one kernel keeps input, weight and 1/rms [.., 1] in float32; a CPU takes it apart in float32
    autocast    widens norms, softmax, sums and powers to float32, which a CPU leaves as they are

torch's own dispatcher decides where the one kernel is taken (not for a weight of another dtype), and which operators
autocast has for CUDA alone: it gets kernels for the CPU beside them. Checked with torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["as_cuda", "kind_of"]

_STANDS: list[str] = []  # what fakes on the CPU are; a list is what the compiler can read
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
# Of autocast's list for CUDA, https://docs.pytorch.org/docs/stable/amp.html: float32 inputs, or a float32 result.
_WIDENED = (
    *("rms_norm", "layer_norm", "native_layer_norm", "group_norm", "exp", "log", "log1p", "reciprocal", "rsqrt"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "logsumexp"),
)
_SUMMED = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod")


def kind_of(device: torch.device) -> str:
    """A device's type, or the one that it stands for."""
    return "cuda" if _STANDS and device.type == "cpu" else device.type


@contextmanager
def as_cuda() -> Iterator[None]:
    """Let fakes on the CPU keep what CUDA's kernels keep: ``_fused_rms_norm``, autocast's list."""
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


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _widened(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*(one.float() if _is_narrow(one) else one for one in args), **kwargs)

    return kernel


def _summed(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, dtype: torch.dtype | None = None) -> Any:
        positional = len(args) == len(operator._schema.arguments)
        given = {} if positional else {"dtype": torch.float32 if dtype is None and _is_narrow(args[0]) else dtype}
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*args, **given)

    return kernel


def _is_narrow(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype in (torch.bfloat16, torch.float16)


def _fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    has_values = not isinstance(x, FakeTensor)
    if has_values or torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return _in_pieces(x, shape, weight, eps)
    out, scale = _RMSNorm.apply(x, weight, shape, eps)
    return out, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.eps = shape, eps
        kept = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
        scale = x.new_empty(kept, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        return torch.empty_like(x, memory_format=torch.contiguous_format), scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # it has a second derivative in pieces alone, on CUDA too
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
    return (out if weight is None else out * weight).to(x.dtype), scale

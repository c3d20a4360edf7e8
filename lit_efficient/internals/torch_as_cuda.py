"""Fake CPU tensors that stand in for CUDA tensors: they save the same tensors for the backward pass.

    rms_norm    on CUDA, one kernel saves input, weight and 1/rms [.., 1] in float32; a CPU uses several operations
    autocast    on CUDA, norms, softmax, sums, powers and resized images are float32; a CPU does not change them

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
from lit_efficient.internals.torch_trees import tree_leaves, tree_map

__all__ = ["as_cuda", "kind_of", "moves", "stands_in", "watching_moves"]

_STANDS: list[str] = []  # device types that fake CPU tensors stand for; a list, because torch.compile can read it
_WATCHERS: list[Callable[[Tensor, bool], None]] = []  # functions that `moves` calls
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
# Autocast's lists for CUDA, https://docs.pytorch.org/docs/stable/amp.html, for operators for which autocast has no
# kernel on a CPU. Torch does not say which list an operator is in: a test compares each with torch's own autocast on
# fake CUDA tensors, and fails if torch changes the lists.
_WIDENED = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "logsumexp"),
    *("rms_norm", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm"),
    *("nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim", "renorm", "cosine_similarity", "dist", "pdist"),
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d")),
    *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
)
_SUMMED = (
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
_NARROWED = ("addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum")
_PROMOTED = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"),
)
# Operators that modules of a CPU do not call, or that call operators for which a CPU's autocast has kernels.
_LEFT = (
    *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
    *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
)


def kind_of(device: torch.device) -> str:
    """Return the type of a device, or the type that it stands for."""
    if _STANDS and device.type == "cpu":
        return "cuda"
    return device.type


def stands_in(tensor: Tensor) -> bool:
    """Return whether a tensor without values stands for one on another device. `moves` reports its copies."""
    return isinstance(tensor, FakeTensor) and kind_of(tensor.device) != tensor.device.type


def moves(tensor: Tensor, away: bool) -> None:
    """Notify all watchers that the memory of a stand-in leaves its device for CPU memory, or comes back."""
    for watcher in _WATCHERS:
        watcher(tensor, away)


@contextmanager
def watching_moves(watcher: Callable[[Tensor, bool], None]) -> Iterator[None]:
    """Context in which a function is called for each of `moves`."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


@contextmanager
def as_cuda() -> Iterator[None]:
    """Context in which fake CPU tensors behave like CUDA tensors: ``_fused_rms_norm``, and the list of autocast."""
    library = torch.library.Library("aten", "IMPL")
    _STANDS.append("cuda")
    try:
        if hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("_fused_rms_norm", _fused_rms_norm, "AutogradCPU")
        for names, make in _LISTS:
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


def _cast(operator: Any, chosen: Callable[[list[Tensor]], torch.dtype], which: Callable[[object], bool]) -> Any:
    """Return a kernel of autocast that casts some tensors among the arguments, and calls the operator."""

    def kernel(*args: Any, **kwargs: Any) -> object:
        found = [one for one in tree_leaves((args, kwargs)) if which(one)]
        if found:
            dtype = chosen(found)
            args, kwargs = tree_map(lambda one: one.to(dtype) if which(one) else one, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*args, **kwargs)

    return kernel


def _widened(operator: Any) -> Any:
    return _cast(operator, lambda _: torch.float32, _is_narrow)


def _narrowed(operator: Any) -> Any:
    return _cast(operator, lambda _: torch.get_autocast_dtype("cpu"), _is_float)


def _promoted(operator: Any) -> Any:
    return _cast(operator, lambda found: max((one.dtype for one in found), key=lambda dtype: dtype.itemsize), _is_float)


def _summed(operator: Any) -> Callable[..., object]:
    def kernel(*args: object, dtype: torch.dtype | None = None, **kwargs: object) -> object:
        if len(args) < len(operator._schema.arguments):  # otherwise dtype is positional
            kwargs["dtype"] = torch.float32 if dtype is None and _is_narrow(args[0]) else dtype
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operator(*args, **kwargs)

    return kernel


def _is_narrow(one: object) -> bool:
    return isinstance(one, Tensor) and one.dtype in (torch.bfloat16, torch.float16)


def _is_float(one: object) -> bool:
    return _is_narrow(one) or (isinstance(one, Tensor) and one.dtype == torch.float32)


_LISTS = ((_WIDENED, _widened), (_SUMMED, _summed), (_NARROWED, _narrowed), (_PROMOTED, _promoted))


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

"""Operators with private names in ``torch.ops``, grouped by purpose. Checked with torch 2.13."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch._ops import OpOverload as Overload

__all__ = [
    "ATTENTION",
    "ATTENTION_KERNELS",
    "GROUPED_MM",
    "LSTM",
    "MATMUL",
    "Overload",
    "base_name",
    "is_batched",
    "lstm_workspace",
    "returns_bool",
    "transformed",
    "writes",
]

_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "another device's",
}
MATMUL = [getattr(torch.ops.aten, name).default for name in _MATMUL]
_BY_LENGTHS = torch.ops.torch_attn._varlen_attn.default  # of `varlen_attn`
ATTENTION = [*(getattr(torch.ops.aten, name).default for name in _ATTENTION), _BY_LENGTHS]
# Kernels of torch's attention, each with an operator that only this kernel calls.
ATTENTION_KERNELS = {getattr(torch.ops.aten, name).default: kind for name, kind in _ATTENTION.items()}
ATTENTION_KERNELS[torch.ops.aten._safe_softmax.default] = "math"
ATTENTION_KERNELS[_BY_LENGTHS] = "flash"
GROUPED_MM = torch.ops.aten._grouped_mm.default
LSTM = torch.ops.aten.mkldnn_rnn_layer.default  # one layer of oneDNN in one direction
_SHORT = (64, 128)  # lengths of the sequences that are measured; their workspaces are multiples of whole pages


def base_name(func: Any) -> str:
    """Return the name of an operator without namespace and overload: ``_overloadpacket``."""
    return str(func._overloadpacket.__name__)


def lstm_workspace(sequence: torch.Tensor, *given: Any) -> int:
    """Return the bytes that an LSTM layer of oneDNN saves for its backward pass.

    Fake tensors do not show it, so short sequences are run through a real layer, and the size is extrapolated.

    Args:
        sequence: ``[T, B, inputs]``. Only shape and dtype are used.
        *given: Other arguments of ``LSTM``. Only the shapes and dtypes of tensors are used.
    """
    tensors = [torch.zeros(one.shape, dtype=one.dtype).requires_grad_() for one in given[:6]]
    sizes = []
    length = len(sequence)
    for steps in _SHORT if length > _SHORT[1] else (length,):
        short = torch.zeros(steps, *sequence.shape[1:], dtype=sequence.dtype)
        with torch.enable_grad():
            *_, workspace = LSTM(short, *tensors, *given[6:])
        sizes.append(0 if workspace is None else workspace.nbytes)
    return sizes[-1] + (length - _SHORT[1]) * (sizes[-1] - sizes[0]) // (_SHORT[1] - _SHORT[0])


def writes(func: Callable[..., object]) -> bool:
    """Return whether an operator changes its arguments: ``_schema``."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def returns_bool(func: Any) -> bool:
    """Return whether an operator returns a ``bool`` instead of a tensor: ``_schema``."""
    return str(func._schema.returns[0].type) == "bool"


def transformed() -> bool:
    """Return whether derivatives are computed by functional transforms or in forward mode."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of those that ``torch.autograd.grad(is_grads_batched=True)`` computes with."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)

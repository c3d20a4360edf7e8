"""Operators that ``torch.ops.aten`` has under private names, by what they compute. Checked with torch 2.13."""

from typing import Any

import torch
from torch._ops import OpOverload as Overload

__all__ = [
    "ATTENTION",
    "ATTENTION_KERNELS",
    "GROUPED_MM",
    "LSTM",
    "MATMUL",
    "Overload",
    "base_name",
    "lstm_workspace",
    "returns_bool",
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
ATTENTION = [getattr(torch.ops.aten, name).default for name in _ATTENTION]
# What torch's attention runs, by the operator that only this kernel has.
ATTENTION_KERNELS = {getattr(torch.ops.aten, name).default: kind for name, kind in _ATTENTION.items()}
ATTENTION_KERNELS[torch.ops.aten._safe_softmax.default] = "math"
GROUPED_MM = torch.ops.aten._grouped_mm.default
LSTM = torch.ops.aten.mkldnn_rnn_layer.default  # one layer in one direction, of oneDNN
_SHORT = 64, 128  # steps of sequences through a real layer, whose pieces are whole pages


def base_name(func: Any) -> str:
    """An operator's name without namespace and overload: ``_overloadpacket``."""
    return str(func._overloadpacket.__name__)


def lstm_workspace(sequence: torch.Tensor, *given: Any) -> int:
    """Bytes of what a layer of oneDNN's keeps for its backward pass: fakes have none, and real ones that of each step.

    Of the sequence ``[T, B, inputs]``, and of tensors among what else ``LSTM`` takes, the shapes are read.
    """
    tensors = [torch.zeros(one.shape, dtype=one.dtype).requires_grad_() for one in given[:6]]
    sizes, length = [], len(sequence)
    for steps in _SHORT if length > _SHORT[1] else (length,):
        short = torch.zeros(steps, *sequence.shape[1:], dtype=sequence.dtype)
        with torch.enable_grad():
            *_, workspace = LSTM(short, *tensors, *given[6:])
        sizes.append(0 if workspace is None else workspace.nbytes)
    return sizes[-1] + (length - _SHORT[1]) * (sizes[-1] - sizes[0]) // (_SHORT[1] - _SHORT[0])


def writes(func: Any) -> bool:
    """Whether an operator changes what it is given: ``_schema``."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def returns_bool(func: Any) -> bool:
    """Whether an operator gives a truth value, and no tensor: ``_schema``."""
    return str(func._schema.returns[0].type) == "bool"

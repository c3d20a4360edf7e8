"""Simulated and real int8 activations and int4 weights: ``torchao.quantization.qat.utils`` and related modules.

Import this module inside functions only, because importing torchao takes seconds. Checked with torchao 0.18.
"""

from typing import Any

import torch
from torch import Tensor
from torchao._executorch_ops import _quantized_decomposed_quantize_per_channel_group_wrapper as _quantize
from torchao.quantization.linear_quant_modules import Int8DynActInt4WeightLinear
from torchao.quantization.qat.utils import _fake_quantize_per_channel_group, _fake_quantize_per_token
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine
from torchao.quantization.utils import get_group_qparams_symmetric

_INT4 = (-8, 7)
_INT8 = (-128, 127)


def rounded_activations(x: Tensor) -> Tensor:
    """Round ``x`` [..., in] to 256 levels between the smallest and largest value of each token.

    Gradients pass through unchanged.
    """
    scale, zero = choose_qparams_affine(
        x,
        mapping_type=MappingType.ASYMMETRIC,
        block_size=[1] * (x.ndim - 1) + [x.shape[-1]],
        target_dtype=torch.int8,
        quant_min=_INT8[0],
        quant_max=_INT8[1],
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.float32,
    )
    return _fake_quantize_per_token(x, scale, zero, *_INT8)


def rounded_weight(weight: Tensor, group_size: int) -> Tensor:
    """Round ``weight`` [out, in] to 16 levels in each group of inputs of a row. Gradients pass through unchanged."""
    scale, zero = get_group_qparams_symmetric(weight, 4, group_size, torch.float32)
    return _fake_quantize_per_channel_group(weight, scale, zero.to(torch.float32), *_INT4, group_size)


def int4_entries(weight: Tensor, group_size: int) -> dict[str, Tensor]:
    """Return the tensors of torchao's int4 layer: codes [out, in] (-8 to 7, int8), scales and zeros [out, in / g]."""
    scale, zero = get_group_qparams_symmetric(weight, 4, group_size, torch.float32)
    codes = _quantize(weight, scale, zero.to(torch.float32), *_INT4, torch.int8, group_size)
    return {"weight": codes, "scales": scale, "zeros": zero}


def int4_layer(entries: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a layer of torchao with the tensors of :func:`int4_entries`. It rounds activations of ``dtype``."""
    out, size = entries["weight"].shape
    groups = entries["scales"].shape[1]
    layer = Int8DynActInt4WeightLinear(size, out, bias is not None, groupsize=size // groups, precision=dtype)
    for name, tensor in entries.items():
        setattr(layer, name, tensor)
    if bias is not None:
        layer.bias = bias.detach()
    return layer

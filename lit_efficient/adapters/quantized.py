"""Reading the quantised layers of bitsandbytes without importing it where there are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_quantized(module: object) -> bool:
    """Whether a layer is one of bitsandbytes' with 4 or 8 bits."""
    return any(base.__name__ in ("Linear4bit", "Linear8bitLt") for base in type(module).__mro__)


def dequantize(module: Any) -> Tensor:
    """The weight of a quantised layer as floats, [out, in]."""
    weight = module.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    scale = weight.SCB if weight.SCB is not None else module.state.SCB
    return weight.data.to(torch.float32) * (scale.to(torch.float32) / 127)[:, None]


def plain_linear(module: Any, weight: Tensor) -> nn.Linear:
    """An ``nn.Linear`` of the same size and bias with the given weight [out, in]."""
    linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    linear.bias = module.bias
    return linear.train(module.training)

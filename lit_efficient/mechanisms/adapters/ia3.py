"""IA3: learned factors of keys, values and the inner activations of feed-forward layers.

    keys, values:   y = l * (W x + b),    l [out]
    feed-forward:   y = W (l * x) + b,    l [in], before the projection down

``l`` starts at one and is the parameter ``ia3`` of the layer. Source: https://arxiv.org/abs/2205.05638.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.disabled import Switchable
from lit_efficient.mechanisms.adapters.quantized import is_conv1d
from lit_efficient.surgery import home_of, mix_in, mix_out


class IA3Scaled(Switchable):
    """Mix-in of a layer that multiplies its output or input by learned factors. It precedes the layer's own class."""

    float32 = ("ia3",)
    ia3: nn.Parameter
    ia3_side: str
    ia3_first: int  # index of the first scaled output; a layer of queries, keys and values has the queries before it

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, with its input or output multiplied by the factors unless the adapter is off."""
        if self.adapter_off:
            return super().forward(x)  # type: ignore[misc]
        if self.ia3_side == "input":
            return super().forward((x * self.ia3).to(x.dtype))  # type: ignore[misc]
        y: Tensor = super().forward(x)  # type: ignore[misc]
        return (y * whole_factors(self.ia3, self.ia3_first)).to(y.dtype)


def whole_factors(factors: Tensor, first: int) -> Tensor:
    """Return factors for all outputs of a layer: ones for the unscaled ``first`` outputs, then ``factors``."""
    if not first:
        return factors
    return torch.cat((factors.new_ones(first), factors))


def sizes(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer or of GPT-2's ``Conv1D``."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]  # Conv1D's weight is [in, out]


def add_ia3(layer: Any, side: str) -> None:
    """Add factors of one to a layer, in place.

    Args:
        layer: A linear layer or ``Conv1D``. GPT-2's ``c_attn`` (out = 3 in), quantised or not, computes queries, keys
            and values, of which the queries are not scaled.
        side: ``output`` or ``input``, which the factors multiply.
    """
    inputs, outputs = sizes(layer)
    first = 0
    if side == "output" and outputs == 3 * inputs and is_conv1d(layer):
        first = inputs
    dtype = torch.float32
    if layer.weight.is_floating_point():
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    size = outputs - first
    if side == "input":
        size = inputs
    layer.ia3 = nn.Parameter(torch.ones(size, dtype=dtype, device=home_of(layer.weight)))
    mix_in(layer, IA3Scaled, ia3_side=side, ia3_first=first)


@torch.no_grad()
def fold_ia3(layer: Any) -> None:
    """Multiply weight and bias by the factors, and remove the factors, in place."""
    factors = whole_factors(layer.ia3, layer.ia3_first)
    per_row = isinstance(layer, nn.Linear) == (layer.ia3_side == "output")
    if per_row:
        layer.weight.copy_(layer.weight * factors[:, None])
    else:
        layer.weight.copy_(layer.weight * factors)
    if layer.ia3_side == "output" and layer.bias is not None:
        layer.bias.copy_(layer.bias * factors)
    mix_out(layer, IA3Scaled)
    for name in ("ia3", "ia3_side", "ia3_first"):
        delattr(layer, name)

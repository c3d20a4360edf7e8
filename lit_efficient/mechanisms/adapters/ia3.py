"""Learned factors on keys, values and the inside of feed-forward layers: the formula, and the layers that use it.

    keys, values:   y = l * (W x + b),    l [out]
    feed-forward:   y = W (l * x) + b,    l [in], before the projection down

``l`` starts at one and stands beside ``weight`` as ``ia3``. Source: https://arxiv.org/abs/2205.05638.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.disabled import Switchable
from lit_efficient.mechanisms.adapters.quantized import is_conv1d
from lit_efficient.surgery import home_of, mix_in, mix_out


class IA3Scaled(Switchable):
    """A layer whose output, or input, is multiplied by learned factors; mixed in front of the layer's own class."""

    float32 = ("ia3",)
    ia3: nn.Parameter
    ia3_side: str
    ia3_first: int  # the first output that is scaled: those before it are queries, where one layer makes all three

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output, with the factors."""
        if self.adapter_off:
            return super().forward(x)  # type: ignore[misc]
        if self.ia3_side == "input":
            return super().forward((x * self.ia3).to(x.dtype))  # type: ignore[misc]
        y: Tensor = super().forward(x)  # type: ignore[misc]
        return (y * whole_factors(self.ia3, self.ia3_first)).to(y.dtype)


def whole_factors(factors: Tensor, first: int) -> Tensor:
    """Factors for all outputs of a layer, ones for the ``first`` (queries) that are not scaled."""
    return torch.cat((factors.new_ones(first), factors)) if first else factors


def sizes(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; GPT-2's ``Conv1D`` keeps its weight as [in, out]."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]


def add_ia3(layer: Any, side: str) -> None:
    """Put factors of one beside a layer, on its ``output`` or ``input``.

    GPT-2's ``c_attn`` (out = 3 in), quantised or not, makes queries, keys and values: queries are left as they are.
    """
    inputs, outputs = sizes(layer)
    first = inputs if side == "output" and outputs == 3 * inputs and is_conv1d(layer) else 0
    dtype = (
        torch.promote_types(layer.weight.dtype, torch.float32) if layer.weight.is_floating_point() else torch.float32
    )
    size = inputs if side == "input" else outputs - first
    layer.ia3 = nn.Parameter(torch.ones(size, dtype=dtype, device=home_of(layer.weight)))
    mix_in(layer, IA3Scaled, ia3_side=side, ia3_first=first)


@torch.no_grad()
def fold_ia3(layer: Any) -> None:
    """Multiply the factors into weight and bias, and make the layer a plain one again."""
    factors = whole_factors(layer.ia3, layer.ia3_first)
    per_row = isinstance(layer, nn.Linear) == (layer.ia3_side == "output")
    layer.weight.copy_(layer.weight * (factors[:, None] if per_row else factors))
    if layer.ia3_side == "output" and layer.bias is not None:
        layer.bias.copy_(layer.bias * factors)
    mix_out(layer, IA3Scaled)
    for name in ("ia3", "ia3_side", "ia3_first"):
        delattr(layer, name)

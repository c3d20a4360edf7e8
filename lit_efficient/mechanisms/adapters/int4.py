"""Weights in four bits with a scale and a zero point for each row and group of inputs, and the layer that holds them.

    w_ij = scale_jl (code_ij - zero_jl),   code in 0..15,   scale = (max - min) / 15,   zero = -min / scale

``l`` is the group of ``g`` neighbouring inputs that ``i`` belongs to. The zero points are floats, so that a change of
the weight that is constant over each group, which is what a QA-LoRA adapter makes, goes into them without a remainder:

    w_ij + delta_jl  <=>  zero_jl - delta_jl / scale_jl,   the codes stay as they are

0.5 + 8 / g bytes a weight: 0.75 for groups of 32, 0.5625 for groups of 128. Source: https://arxiv.org/abs/2309.14717
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import Loads, StaysFloat32

LEVELS = 15  # the largest code


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to four bits, group by group, between the group's least and largest value.

    Args:
        weight: [out, in] of any float type.
        group_size: ``g``, even, a divisor of ``in``.

    Returns:
        Codes [out, in / 2] in uint8, two in a byte, the first of them in its lower half; scales and zero points, both
        [out, in / g], in float32 at least.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    groups = wide.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / LEVELS
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)  # a constant group: its codes are all 0
    zero = -low / scale
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, LEVELS).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero


def unpack_codes(packed: Tensor) -> Tensor:
    """Codes [out, in], one a byte, from two a byte."""
    return torch.stack((packed & LEVELS, packed >> 4), -1).flatten(1)


def dequantize_groups(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The matrix [out, in] that codes, scales and zero points stand for, in the type of the scales."""
    codes = unpack_codes(packed).to(scale.dtype).unflatten(1, (scale.shape[1], -1))
    return ((codes - zero[..., None]) * scale[..., None]).flatten(1)


def codes_on_grid(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Codes [out, in / 2] of the nearest values that given scales and zero points [out, in / g] can hold."""
    groups = weight.unflatten(1, (scale.shape[1], -1))
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, LEVELS).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def shifted_zeros(scale: Tensor, zero: Tensor, delta: Tensor) -> Tensor:
    """The zero points [out, in / g] with which each weight is larger by its group's ``delta`` [out, in / g]."""
    wide = torch.promote_types(zero.dtype, delta.dtype)
    return (zero.to(wide) - delta.to(wide) / scale.to(wide)).to(zero.dtype)


class _Product(torch.autograd.Function):
    """``x W^T`` that keeps the codes for the backward pass, not the float weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scale, zero)
        return F.linear(x, dequantize_groups(packed, scale, zero).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient @ dequantize_groups(*ctx.saved_tensors).to(gradient.dtype), None, None, None


def check_input(layer: Any, x: Tensor) -> None:
    """Refuse an input that somebody has cast to the type of a layer's codes.

    Raises:
        ConfigurationError: Naming the layer's sizes; it does not know its name.
    """
    if not x.is_floating_point():
        raise ConfigurationError(
            f"a quantised layer of {layer.in_features} inputs and {layer.out_features} outputs was given {x.dtype}: "
            "the code around it casts what it gives to weight.dtype, which is that of the codes. Name the layer in skip"
        )


class Int4Linear(Loads, StaysFloat32, nn.Linear):
    """A frozen linear layer in four bits; ``weight`` holds the codes, ``weight_scale`` and ``weight_zero`` the rest.

    Loads its own checkpoints, and those of the float layer, whose weight [out, in] is quantised on the way; the bias
    stays as it is. Scales and zero points stay in float32 when the module is cast to less.
    """

    quant_format = "int4"
    float32 = ("weight_scale", "weight_zero")
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, group_size: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.group_size = group_size
        packed, scale, zero = quantize_groups(weight, group_size)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight_zero = nn.Parameter(zero, requires_grad=False)
        self.bias = bias  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """The product with the dequantised weight, in the input's type, [..., in] -> [..., out]."""
        check_input(self, x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self.weight, self.weight_scale, self.weight_zero)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self) -> Tensor:
        """The weight as floats, [out, in]."""
        return dequantize_groups(self.weight, self.weight_scale, self.weight_zero).detach()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.is_floating_point():
            oriented = given.T if getattr(self, "quant_transposed", False) else given
            for name, tensor in zip(
                ("weight", "weight_scale", "weight_zero"), quantize_groups(oriented, self.group_size), strict=True
            ):
                state_dict[f"{prefix}{name}"] = tensor

"""Linear layer with 4-bit weights, which have a scale and a zero point for each row and group of inputs.

    w_ij = scale_jl (code_ij - zero_jl),   code in 0..15,   scale = (max - min) / 15,   zero = -min / scale

``l`` is the group of ``g`` neighbouring inputs to which ``i`` belongs. The zero points are floats. They can therefore
absorb exactly a change of the weight that is constant over each group, such as that of a QA-LoRA adapter:

    w_ij + delta_jl  <=>  zero_jl - delta_jl / scale_jl,   with unchanged codes

A weight takes 0.5 + 8 / g bytes: 0.75 for groups of 32, 0.5625 for groups of 128.
Source: https://arxiv.org/abs/2309.14717
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import Loads, StaysFloat32
from lit_efficient.surgery import in_autocast_dtype

LEVELS = 15  # the largest code


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to 4 bits. The codes of each group cover the range from its smallest to its largest value.

    Args:
        weight: Float matrix, [out, in].
        group_size: ``g``, an even divisor of ``in``.

    Returns:
        Codes [out, in / 2] in uint8, scales [out, in / g] and zero points [out, in / g], the latter two in float32 or
        wider. A byte holds two codes, the first one in its lower half.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    groups = wide.unflatten(1, (-1, group_size))
    low = groups.amin(-1)
    high = groups.amax(-1)
    scale = (high - low) / LEVELS
    # A group of equal values would have a scale of 0. With a scale of 1 its codes are 0.
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)
    zero = -low / scale
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, LEVELS).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero


def unpack_codes(packed: Tensor) -> Tensor:
    """Return the codes [out, in], one in each byte, of packed codes [out, in / 2]."""
    return torch.stack((packed & LEVELS, packed >> 4), -1).flatten(1)


def dequantize_groups(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the matrix [out, in] that packed codes, scales and zero points encode, with the dtype of the scales."""
    codes = unpack_codes(packed).to(scale.dtype).unflatten(1, (scale.shape[1], -1))
    return ((codes - zero[..., None]) * scale[..., None]).flatten(1)


def codes_on_grid(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the packed codes [out, in / 2] of the values nearest to a weight, with given scales and zero points."""
    groups = weight.unflatten(1, (scale.shape[1], -1))
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, LEVELS).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def shifted_zeros(scale: Tensor, zero: Tensor, delta: Tensor) -> Tensor:
    """Return zero points with which each weight is larger by the ``delta`` of its group. All shapes: [out, in / g]."""
    wide = torch.promote_types(zero.dtype, delta.dtype)
    return (zero.to(wide) - delta.to(wide) / scale.to(wide)).to(zero.dtype)


class _Product(torch.autograd.Function):
    """Product ``x W^T`` that stores the codes for the backward pass instead of the float weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scale, zero)
        return F.linear(x, dequantize_groups(packed, scale, zero).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient @ dequantize_groups(*ctx.saved_tensors).to(gradient.dtype), None, None, None


def check_input(layer: Any, x: Tensor) -> None:
    """Check that the input of a quantised layer consists of floats.

    Raises:
        ConfigurationError: If the input has another dtype. The message names the sizes of the layer, which does not
            know its own name.
    """
    if not x.is_floating_point():
        raise ConfigurationError(
            f"a quantised layer with {layer.in_features} inputs and {layer.out_features} outputs was given {x.dtype}. "
            "The model casts the input to weight.dtype, which is the dtype of the codes. Name the layer in skip"
        )


class Int4Linear(Loads, StaysFloat32, nn.Linear):
    """Frozen linear layer with 4-bit weights: codes ``weight``, scales ``weight_scale``, zero points ``weight_zero``.

    The layer loads its own checkpoints and those of a float layer, whose weight [out, in] is then quantised. The bias
    is not quantised. Scales and zero points stay in float32 when the module is cast to a narrower format.

    Args:
        weight: Float weight, [out, in].
        bias: Bias parameter, [out], or None.
        group_size: Number of inputs that share a scale.
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
        """Return the product with the dequantised weight, [..., in] -> [..., out], with the input's dtype."""
        check_input(self, x)
        x = in_autocast_dtype(x)
        y: Tensor = _Product.apply(x, self.weight, self.weight_scale, self.weight_zero)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)

    def dequantized(self) -> Tensor:
        """Return the weight as floats, [out, in]."""
        return dequantize_groups(self.weight, self.weight_scale, self.weight_zero).detach()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.is_floating_point():
            if getattr(self, "quant_transposed", False):
                given = given.T
            packed, scale, zero = quantize_groups(given, self.group_size)
            state_dict[f"{prefix}weight"] = packed
            state_dict[f"{prefix}weight_scale"] = scale
            state_dict[f"{prefix}weight_zero"] = zero

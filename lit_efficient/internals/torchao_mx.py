"""Number formats with a scale for each block: ``torchao.prototype.mx_formats`` and ``torchao.prototype.moe_training``.

    mxfp4, mxfp8   q(x / s) s,     s = a power of two for each 32 values of a row
    nvfp4          q(x / s) s t,   s = a float8 for each 16 values of a row, t = one float32

Products are computed from the rounded values, on any device. The numbers are those of torchao's emulation. Import this
module inside functions only, because importing torchao takes seconds. Checked with torchao 0.18.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

_ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
_BLOCK = 32
_EMULATED = KernelPreference.EMULATED
_MODE = ScaleCalculationMode.RCEIL
_SMALLEST = 1e-20  # maximum of a tensor of zeros, which torchao would divide by zero


def _codes(x: Tensor, format: str) -> Any:
    """Return a matrix [rows, in] as torchao's tensor in a format."""
    if format == "nvfp4":
        scale = per_tensor_amax_to_scale(x.abs().max().clamp_min(_SMALLEST))
        return NVFP4Tensor.to_nvfp4(x.contiguous(), per_tensor_scale=scale)
    return MXTensor.to_mx(x.contiguous(), _ELEMENTS[format], _BLOCK, _MODE, _EMULATED)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, format: str) -> Tensor:
        return _codes(x.reshape(-1, x.shape[-1]), format).dequantize(x.dtype).reshape(x.shape)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def rounded_blocks(x: Tensor, format: str) -> Tensor:
    """Round ``x`` [..., in] to ``mxfp4``, ``mxfp8`` or ``nvfp4``. Gradients pass through unchanged."""
    rounded: Tensor = _Rounded.apply(x, format)
    return rounded


def block_entries(weight: Tensor, format: str) -> dict[str, Tensor]:
    """Return codes and scales of a weight [out, in]: two 4-bit codes in a byte; scales [out, in / block]."""
    codes = _codes(weight, format)
    if format == "nvfp4":
        return {"weight": codes.qdata, "scales": codes.scale, "tensor_scale": codes.per_tensor_scale}
    return {"weight": codes.qdata, "scales": codes.scale.view(torch.uint8)}


def block_layer(entries: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> nn.Linear:
    """Return a layer whose weight is torchao's tensor of :func:`block_entries`, and which rounds its input."""
    data, scales = entries["weight"], entries["scales"]
    weight: Any
    if "tensor_scale" in entries:
        weight = NVFP4Tensor(data, scales, 16, dtype, entries["tensor_scale"])
    else:
        element = _ELEMENTS["mxfp8" if data.is_floating_point() else "mxfp4"]
        inputs = QuantizeTensorToMXKwargs(
            elem_dtype=element, block_size=_BLOCK, kernel_preference=_EMULATED, scaling_mode=_MODE
        )
        scale = scales.view(torch.float8_e8m0fnu)
        weight = MXTensor(data, scale, element, _BLOCK, dtype, _EMULATED, inputs, False)
    layer = _RoundsInput if "tensor_scale" in entries else nn.Linear
    made = layer(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


class _RoundsInput(nn.Linear):
    """Layer with an NVFP4 weight. torchao's own product with a rounded input runs on Blackwell only."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(rounded_blocks(x, "nvfp4"), weight.dequantize(x.dtype), self.bias)


@dataclass(frozen=True)
class BlockProduct:
    """Settings of a product in MXFP8.

    Args:
        emulate: Compute with the rounded values in float, on hardware without such products.
        exact_weight_gradient: Compute the gradient of the weight without rounding.
    """

    emulate: bool
    exact_weight_gradient: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x W^T``, as :func:`lit_efficient.internals.torchao_float8.float8_product` does."""
        flat = x.reshape(-1, x.shape[-1])
        rows = len(flat)
        weight = weight.to(x.dtype)
        kernels = (MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.CUDA)
        if self.emulate:
            kernels = (MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
        preference = _EMULATED if self.emulate else KernelPreference.AUTO
        element = _ELEMENTS["mxfp8"]
        with torch.autocast(x.device.type, enabled=False):
            if weight.requires_grad:
                flat = F.pad(flat, (0, 0, 0, -rows % _BLOCK))  # the gradient of the weight sums over blocks of rows
                elements = (element, element, element)
                y = mx_mm.apply(
                    flat, weight, *elements, _BLOCK, preference, *kernels, _MODE, self.exact_weight_gradient
                )
            else:
                y = _FrozenProduct.apply(flat, weight, preference, *kernels)
        return y[:rows].reshape(*x.shape[:-1], -1)


@torch.compiler.allow_in_graph
class _FrozenProduct(torch.autograd.Function):
    """``mx_mm`` without the gradient of the weight, which does not save its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, preference: Any, rows: Any, columns: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.how = preference, rows
        x_codes, codes = (_narrowed(one, preference, rows) for one in (x, weight))
        return torch.mm(x_codes, codes.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        given = _narrowed(gradients[0].contiguous(), *ctx.how)
        codes = _narrowed(weight.t().contiguous(), *ctx.how)
        return torch.mm(given, codes.t()), None, None, None, None


def _narrowed(x: Tensor, preference: Any, rows: Any) -> Any:
    element = _ELEMENTS["mxfp8"]
    return MXTensor.to_mx(x, element, _BLOCK, _MODE, preference, mxfp8_dim0_cast_kernel_choice=rows)

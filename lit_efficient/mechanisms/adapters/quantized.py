"""Quantised layers of all formats: made from float ones, read back as floats, found in modules and in checkpoints.

The formats and their formulas are in :mod:`lit_efficient.mechanisms.adapters.bitsandbytes_layers` and
:mod:`lit_efficient.mechanisms.adapters.int4`. bitsandbytes is imported only where its layers are made or met.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.bitsandbytes_cpu import read_any_rows
from lit_efficient.mechanisms.adapters.int4 import Int4Linear, dequantize_groups
from lit_efficient.models.networks.expert_layers import ExpertLinear, GroupedLayer, Groups, grouped_linear
from lit_efficient.surgery import mix_in

FORMATS = ("nf4", "fp4", "int8", "int4")
_BITSANDBYTES = ("Linear4bit", "Linear8bitLt")


def is_bitsandbytes(module: object) -> bool:
    """Whether a layer is one of bitsandbytes' with 4 or 8 bits."""
    return any(base.__name__ in _BITSANDBYTES for base in type(module).__mro__)


def is_quantized(module: object) -> bool:
    """Whether a layer holds codes in the place of a float weight."""
    return isinstance(module, Int4Linear) or is_bitsandbytes(module)


def is_conv1d(module: object) -> bool:
    """Whether a layer is, or was made from, GPT-2's linear layer, whose weight is [in, out]."""
    kind = getattr(module, "source_cls", type(module))  # of what transformers quantised
    return getattr(module, "quant_transposed", False) or any(
        base.__module__ == "transformers.pytorch_utils" and base.__name__ == "Conv1D" for base in kind.__mro__
    )


def quantize_linear(
    layer: Any,
    format: str = "nf4",
    *,
    double_quant: bool = True,
    group_size: int = 32,
    device: torch.device | None = None,
) -> Any:
    """The quantised twin of a linear layer (or ``Conv1D``), frozen, with the same bias parameter; the layer is left as
    it was.

    It is rounded on ``device``, and is where the layer was.
    """
    if isinstance(layer, ExpertLinear):
        return _quantized_experts(layer, format, double_quant=double_quant, group_size=group_size, device=device)
    transposed = is_conv1d(layer)
    home = layer.weight.device
    weight = layer.weight.detach().to(home if device is None or home.type == "meta" else device)
    weight = (weight.T if transposed else weight).contiguous()
    twin: Any
    if format == "int4":
        twin = Int4Linear(weight, layer.bias, group_size)
    else:
        from lit_efficient.mechanisms.adapters.bitsandbytes_layers import bitsandbytes_linear

        twin = bitsandbytes_linear(weight, layer.bias, format, double_quant=double_quant)
    twin.quant_transposed = transposed
    return twin.train(layer.training) if weight.device == home else twin.train(layer.training).to(home)


class QuantizedExperts(GroupedLayer):
    """Mix-in of a quantised layer that holds the outputs of all experts one under the other, [E * out, in]."""

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the sorted tokens, [M, in] -> [M, out]; the weights are floats while it runs alone."""
        groups = self.known_groups()
        y: Tensor = _QuantizedProduct.apply(x, self, groups)
        return y if self.bias is None else y + self.bias.to(y.dtype)[groups.experts]

    def dense_weight(self) -> Tensor:
        """The weight as floats, in the shape that it had."""
        rows = dequantize(self).unflatten(0, (self.expert_shape[0], -1))
        return rows.mT if self.is_transposed else rows

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take floats of any shape."""
        super().before_load(state_dict, prefix)
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.ndim == 3:
            state_dict[f"{prefix}weight"] = (given.mT if self.is_transposed else given).flatten(0, 1)
        super(GroupedLayer, self).before_load(state_dict, prefix)  # of the quantised layer


class _QuantizedProduct(torch.autograd.Function):
    """The grouped product with weights that are dequantised again for the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedExperts, groups: Groups) -> Tensor:
        ctx.layer, ctx.groups = layer, groups
        return grouped_linear(x, layer.dense_weight().to(x.dtype), None, groups, layer.is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layer = ctx.layer
        weight = layer.dense_weight().to(grad.dtype)
        return grouped_linear(grad.contiguous(), weight, None, ctx.groups, not layer.is_transposed), None, None


def _quantized_experts(layer: ExpertLinear, format: str, **how: Any) -> Any:
    rows = (layer.weight.mT if layer.is_transposed else layer.weight).detach().flatten(0, 1)
    flat = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta").train(layer.training)
    flat.weight = nn.Parameter(rows, requires_grad=False)
    twin = quantize_linear(flat, format, **how)
    twin.bias = layer.bias
    mix_in(twin, QuantizedExperts, expert_shape=layer.expert_shape, is_transposed=layer.is_transposed)
    return twin


def elements(parameter: Tensor) -> int:
    """Number of weights that a parameter stands for: of 4-bit codes two lie in a byte."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


def stored_bytes(layer: Any) -> int:
    """Bytes of a quantised layer's weight, scales and tables included."""
    size: int = layer.weight.nbytes
    if isinstance(layer, Int4Linear):
        return size + layer.weight_scale.nbytes + layer.weight_zero.nbytes
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return size + layer.weight.SCB.nbytes
    held = [state, *([state.state2] if state.nested else [])]
    offset = state.offset.nbytes if state.nested else 0
    return size + offset + sum(one.absmax.nbytes + one.code.nbytes for one in held)


def dequantize(module: Any) -> Tensor:
    """The weight of a quantised layer as floats, [out, in]."""
    if isinstance(module, Int4Linear):
        return module.dequantized()
    weight = module.weight
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)  # FSDP2's weights have none
    if state is not None:
        return _dequantize_4bit(weight.data, state)
    return _dequantize_8bit(weight.data, weight.SCB if weight.SCB is not None else module.state.SCB)


def _dequantize_4bit(codes: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    read_any_rows()
    return dequantize_4bit(codes, state)


def _dequantize_8bit(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(torch.float32) * (scale.to(torch.float32) / 127)[:, None]


def plain_layer(module: Any, weight: Tensor) -> nn.Module:
    """The float layer that a quantised one was made from, with the given weight [out, in] and the same bias."""
    layer: Any
    if isinstance(module, QuantizedExperts):
        if weight.ndim == 2:
            weight = weight.unflatten(0, (module.expert_shape[0], -1))
            weight = weight.mT if module.is_transposed else weight
        frozen = nn.Parameter(weight.contiguous(), requires_grad=False)
        return ExpertLinear(frozen, module.bias, module.is_transposed).train(module.training)  # type: ignore[attr-defined]
    if is_conv1d(module):
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            layer = Conv1D(module.out_features, module.in_features)
        weight = weight.T.contiguous()
    else:
        layer = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = module.bias
    return layer.train(module.training)


def quantization_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """How each quantised layer of a module was made, by its name, as primitives for a checkpoint."""
    return {
        name: {
            "format": part.quant_format,
            "double_quant": getattr(part, "quant_double", False),
            "group_size": getattr(part, "group_size", 0),
            "transposed": is_conv1d(part),
        }
        for name, part in module.named_modules()
        if is_quantized(part) and hasattr(part, "quant_format")
    }


def quantize_entry(state: dict[str, Tensor], name: str, how: Mapping[str, Any]) -> None:
    """Round the float weight of a layer in a ``state_dict`` as :func:`quantization_of` says it was.

    int4 is left as codes, scales and zero points, the other formats as floats.
    """
    key = f"{name}.weight"
    shape = state[key].shape
    weight = state[key].T if how["transposed"] else state[key].flatten(0, -2)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    twin = quantize_linear(layer, how["format"], double_quant=how["double_quant"], group_size=how["group_size"] or 32)
    if isinstance(twin, Int4Linear):
        state |= {f"{name}.{k}": tensor for k, tensor in twin.state_dict().items()}
    else:
        state[key] = _oriented(dequantize(twin), transposed=how["transposed"]).view(shape)


def dequantize_entry(state: dict[str, Tensor], name: str, *, transposed: bool = False) -> None:
    """Put floats in the place of a quantised layer's weight and constants in a ``state_dict``."""
    key = f"{name}.weight"
    prefixes = (f"{key}.", f"{key}_scale", f"{key}_zero", f"{key}_format", f"{name}.SCB")
    constants = {k.removeprefix(f"{name}."): state.pop(k) for k in list(state) if k.startswith(prefixes)}
    state[key] = _oriented(_floats(state[key], constants), transposed=transposed)


def is_code(tensor: Tensor) -> bool:
    """Whether a weight in a ``state_dict`` is quantised."""
    return tensor.dtype in (torch.uint8, torch.int8)


def _oriented(weight: Tensor, *, transposed: bool) -> Tensor:
    return weight.T.contiguous() if transposed else weight


def _floats(codes: Tensor, constants: Mapping[str, Tensor]) -> Tensor:
    if "weight_zero" in constants:
        return dequantize_groups(codes, constants["weight_scale"], constants["weight_zero"])
    if "SCB" in constants:
        return _dequantize_8bit(codes, constants["SCB"])
    from lit_efficient.mechanisms.adapters.bitsandbytes_layers import state_4bit

    named = {key.removeprefix("weight."): tensor for key, tensor in constants.items()}
    return _dequantize_4bit(codes, state_4bit(named, codes.device))

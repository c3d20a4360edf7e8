"""Quantised layers of all formats: quantisation, dequantisation, and their entries in checkpoints.

The formats and their formulas are in :mod:`lit_efficient.mechanisms.adapters.bitsandbytes_layers` and
:mod:`lit_efficient.mechanisms.adapters.int4`. bitsandbytes is imported only when one of its layers is used.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.int4 import Int4Linear, dequantize_groups
from lit_efficient.mechanisms.adapters.starts import rounding_factors
from lit_efficient.models.networks.grouped_linear import ExpertLinear, GroupedLayer, Groups, grouped_linear
from lit_efficient.surgery import mix_in

FORMATS = ("nf4", "fp4", "int8", "int4")
SOURCE = "quant_source"  # attribute of a quantised layer: its weight before, [out, in], until an adapter starts from it
_STACK = "Stack4bit"
_BITSANDBYTES = ("Linear4bit", "Linear8bitLt", _STACK)


def is_bitsandbytes(module: object) -> bool:
    """Return whether a layer holds codes of bitsandbytes: its 4-bit and 8-bit layers, and stacks of experts."""
    return any(base.__name__ in _BITSANDBYTES for base in type(module).__mro__)


def is_stack(module: object) -> bool:
    """Return whether a layer holds the codes of stacked matrices, and replaces a parameter of the module around it."""
    return any(base.__name__ == _STACK for base in type(module).__mro__)


def float_name(name: str, module: object) -> str:
    """Return the name that the weight of a quantised layer has without quantisation."""
    return name if is_stack(module) else f"{name}.weight"


def is_quantized(module: object) -> bool:
    """Return whether the weight of a layer is quantised."""
    return isinstance(module, Int4Linear) or is_bitsandbytes(module)


def is_conv1d(module: object) -> bool:
    """Return whether a layer is GPT-2's linear layer, whose weight is [in, out], or was quantised from one."""
    if getattr(module, "quant_transposed", False):
        return True
    kind = getattr(module, "source_cls", type(module))  # transformers' mark on a layer that it has quantised
    return any(base.__module__ == "transformers.pytorch_utils" and base.__name__ == "Conv1D" for base in kind.__mro__)


def quantize_linear(
    layer: Any,
    format: str = "nf4",
    *,
    double_quant: bool = True,
    group_size: int = 32,
    device: torch.device | None = None,
) -> Any:
    """Return a frozen, quantised copy of a linear layer or ``Conv1D``. The copy shares the bias parameter.

    Args:
        layer: The layer, which does not change.
        format: ``nf4``, ``fp4``, ``int8`` or ``int4``.
        double_quant: Quantise the scales of ``nf4`` and ``fp4`` as well.
        group_size: Number of inputs that share a scale in ``int4``.
        device: Device on which the weight is rounded; the device of the layer if it is None. The copy is on the device
            of the layer in both cases.
    """
    if isinstance(layer, ExpertLinear):
        return _quantized_experts(layer, format, double_quant=double_quant, group_size=group_size, device=device)
    transposed = is_conv1d(layer)
    home = layer.weight.device
    weight = layer.weight.detach()
    if device is not None and home.type != "meta":
        weight = weight.to(device)
    if transposed:
        weight = weight.T
    weight = weight.contiguous()
    twin: Any
    if format == "int4":
        twin = Int4Linear(weight, layer.bias, group_size)
    else:
        from lit_efficient.mechanisms.adapters.bitsandbytes_layers import bitsandbytes_linear

        twin = bitsandbytes_linear(weight, layer.bias, format, double_quant=double_quant)
    twin.quant_transposed = transposed
    twin.train(layer.training)
    if weight.device != home:
        twin.to(home)
    return twin


class QuantizedExperts(GroupedLayer):
    """Mix-in of a quantised layer whose weight holds the rows of all experts, [E * out, in]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of the sorted tokens with their experts' weights, [M, in] -> [M, out].

        The weights are dequantised only for the duration of the call.
        """
        groups = self.known_groups()
        y: Tensor = _QuantizedProduct.apply(x, self, groups)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)[groups.experts]

    def dense_weight(self) -> Tensor:
        """Return the dequantised weight, [E, out, in], or [E, in, out] if ``is_transposed``."""
        rows = dequantize(self).unflatten(0, (self.expert_shape[0], -1))
        return _oriented(rows, self.is_transposed)

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Accept a float weight of one matrix for each expert."""
        super().before_load(state_dict, prefix)
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.ndim == 3:
            state_dict[f"{prefix}weight"] = _oriented(given, self.is_transposed).flatten(0, 1)
        super(GroupedLayer, self).before_load(state_dict, prefix)  # the method of the quantised layer


class _QuantizedProduct(torch.autograd.Function):
    """Grouped product that dequantises the weights again in the backward pass instead of storing them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedExperts, groups: Groups) -> Tensor:
        ctx.layer = layer
        ctx.groups = groups
        return grouped_linear(x, layer.dense_weight().to(x.dtype), None, groups, layer.is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layer = ctx.layer
        weight = layer.dense_weight().to(grad.dtype)
        return grouped_linear(grad.contiguous(), weight, None, ctx.groups, not layer.is_transposed), None, None


def _quantized_experts(layer: ExpertLinear, format: str, **how: Any) -> Any:
    rows = _oriented(layer.weight, layer.is_transposed).detach().flatten(0, 1)
    # On the meta device no memory is allocated for the weight, which is replaced.
    flat = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta").train(layer.training)
    flat.weight = nn.Parameter(rows, requires_grad=False)
    twin = quantize_linear(flat, format, **how)
    twin.bias = layer.bias
    mix_in(twin, QuantizedExperts, expert_shape=layer.expert_shape, is_transposed=layer.is_transposed)
    return twin


def float_count(module: nn.Module) -> int:
    """Return the number of parameters that a module has without quantisation, with tied parameters counted once.

    Two codes in a byte count as two weights. Scales and zero points do not count.
    """
    constants = set()
    for part in module.modules():
        if isinstance(part, Int4Linear):
            constants |= {id(part.weight_scale), id(part.weight_zero)}
    return sum(_elements(p) for p in module.parameters() if id(p) not in constants)


def _elements(parameter: Tensor) -> int:
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    if parameter.dtype == torch.uint8:
        return 2 * parameter.numel()
    return parameter.numel()


def stored_bytes(layer: Any) -> int:
    """Return the size in bytes of a quantised layer's weight, including scales and tables."""
    size: int = layer.weight.nbytes
    if isinstance(layer, Int4Linear):
        return size + layer.weight_scale.nbytes + layer.weight_zero.nbytes
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return size + layer.weight.SCB.nbytes
    size += state.absmax.nbytes + state.code.nbytes
    if state.nested:
        size += state.offset.nbytes + state.state2.absmax.nbytes + state.state2.code.nbytes
    return size


def dequantize(module: Any) -> Tensor:
    """Return the weight of a quantised layer as floats, [out, in]."""
    if isinstance(module, Int4Linear):
        return module.dequantized()
    weight = module.weight
    # FSDP2 replaces the parameter by one without constants; the layer has them as well.
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is not None:
        return _dequantize_4bit(weight.data, state)
    scale = weight.SCB
    if scale is None:
        scale = module.state.SCB
    return _dequantize_8bit(weight.data, scale)


def _dequantize_4bit(codes: Tensor, state: object) -> Tensor:
    from lit_efficient.internals.bitsandbytes_cpu import dequantized

    return dequantized(codes, state)


def _dequantize_8bit(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(torch.float32) * (scale.to(torch.float32) / 127)[:, None]


def plain_layer(module: Any, weight: Tensor) -> Any:
    """Return a float layer of the type that was quantised, with a given weight and the same bias parameter.

    Args:
        module: The quantised layer.
        weight: Float weight, [out, in]. For stacked experts, it may also have the shape of the experts' weight.

    Returns:
        The layer, or the parameter alone for a stack, which replaces a parameter.
    """
    layer: Any
    if is_stack(module):
        return nn.Parameter(weight, requires_grad=False)
    if isinstance(module, QuantizedExperts):
        if weight.ndim == 2:
            weight = _oriented(weight.unflatten(0, (module.expert_shape[0], -1)), module.is_transposed)
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
    """Return the quantisation settings of each quantised layer by name, as primitives for a checkpoint."""
    found: dict[str, dict[str, object]] = {}
    for name, part in module.named_modules():
        if is_quantized(part) and hasattr(part, "quant_format"):
            found[name] = {
                "format": part.quant_format,
                "double_quant": getattr(part, "quant_double", False),
                "group_size": getattr(part, "group_size", 0),
                "transposed": is_conv1d(part),
            }
            if is_stack(part):
                found[name]["stack"] = list(part.shape)
            if getattr(part, "lora_rounds", 1) > 1:
                found[name]["loftq"] = [len(part.lora_A), part.lora_scale, part.lora_rounds]
    return found


def quantize_entry(state: dict[str, Tensor], name: str, how: Mapping[str, Any]) -> None:
    """Round the float weight of a layer in a ``state_dict``, in place.

    The result consists of codes, scales and zero points for int4, and of rounded floats for the other formats.

    Args:
        state: The state dict.
        name: Dotted name of the layer.
        how: The layer's settings from :func:`quantization_of`. With several rounds of LoftQ the weight is rounded
            beside the adapter of the last round but one.
    """
    key = name if "stack" in how else f"{name}.weight"
    shape = state[key].shape
    if how["transposed"]:
        weight = state[key].T
    else:
        weight = state[key].flatten(0, -2)  # the rows of all experts, if the weight is a stack

    def rounded(matrix: Tensor) -> Any:
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(matrix.to(weight.dtype), requires_grad=False)
        return quantize_linear(
            layer, how["format"], double_quant=how["double_quant"], group_size=how["group_size"] or 32
        )

    twin = rounded(weight)
    if "loftq" in how:
        rank, scale, rounds = how["loftq"]
        wide = weight.float()
        a, b = rounding_factors(wide, lambda matrix: dequantize(rounded(matrix)).float(), rank, scale, rounds - 1)
        twin = rounded(wide - scale * (b @ a))
    if isinstance(twin, Int4Linear):
        state |= {f"{name}.{k}": tensor for k, tensor in twin.state_dict().items()}
    else:
        state[key] = _oriented(dequantize(twin), how["transposed"]).contiguous().view(shape)


def dequantize_entry(
    state: dict[str, Tensor], name: str, *, transposed: bool = False, stack: Sequence[int] | None = None
) -> None:
    """Replace a quantised layer's weight and constants in a ``state_dict`` by a float weight, in place.

    The weight of a stack gets the given shape, and the name of the parameter that the stack replaced.
    """
    key = f"{name}.weight"
    prefixes = (f"{key}.", f"{key}_scale", f"{key}_zero", f"{key}_format", f"{name}.SCB")
    constants = {k.removeprefix(f"{name}."): state.pop(k) for k in list(state) if k.startswith(prefixes)}
    floats = _oriented(_floats(state.pop(key), constants), transposed).contiguous()
    if stack is None:
        state[key] = floats
    else:
        state[name] = floats.view(*stack)


def is_code(tensor: Tensor) -> bool:
    """Return whether a weight in a ``state_dict`` is quantised."""
    return tensor.dtype in (torch.uint8, torch.int8)


def _oriented(weight: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return weight.mT
    return weight


def _floats(codes: Tensor, constants: Mapping[str, Tensor]) -> Tensor:
    if "weight_zero" in constants:
        return dequantize_groups(codes, constants["weight_scale"], constants["weight_zero"])
    if "SCB" in constants:
        return _dequantize_8bit(codes, constants["SCB"])
    from lit_efficient.mechanisms.adapters.bitsandbytes_layers import state_4bit

    named = {key.removeprefix("weight."): tensor for key, tensor in constants.items()}
    return _dequantize_4bit(codes, state_4bit(named, codes.device))

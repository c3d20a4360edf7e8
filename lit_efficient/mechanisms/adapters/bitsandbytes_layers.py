"""Frozen 4-bit and 8-bit layers of bitsandbytes, extended so that they load the checkpoints that they save.

nf4, fp4   w = absmax_block * table[code],  blocks of 64;  double_quant stores absmax in 8 bits, in blocks of 256
int8       w = absmax_row * code / 127;  columns with an input above 6 are multiplied in 16 bits, as in transformers
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked
from lit_efficient.internals.torch_modules import Loads, Moves, Saves
from lit_efficient.mechanisms.adapters.int4 import check_input
from lit_efficient.surgery import in_autocast_dtype, mix_in

# transformers' default of llm_int8_threshold. Without it, the outliers of a real model's activations set the scale of a
# row, and the other inputs are rounded away.
_OUTLIER = 6.0
_PIECE = 2**20  # number of weights that one call quantises, a multiple of the block size


def bitsandbytes_linear(
    weight: Tensor, bias: nn.Parameter | None, format: str = "nf4", *, double_quant: bool = True
) -> Any:
    """Return a quantised linear layer of bitsandbytes.

    Args:
        weight: Float weight, [out, in], which does not change.
        bias: Bias parameter of the layer, or None.
        format: ``nf4``, ``fp4`` or ``int8``.
        double_quant: Quantise the scales of the 4-bit formats as well.
    """
    import bitsandbytes as bnb

    sizes = (weight.shape[1], weight.shape[0], bias is not None)
    layer: Any
    if format == "int8":
        layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=_OUTLIER, device="meta")
    else:
        layer = bnb.nn.Linear4bit(*sizes, quant_type=format, device="meta", compress_statistics=double_quant)
    layer.weight = _quantized_weight(weight.detach(), format, double_quant)
    layer.bias = bias
    adopt(layer)
    return layer


def adopt(layer: Any) -> None:
    """Extend a layer of bitsandbytes, so that it loads its own checkpoints and passes gradients in eval mode."""
    if isinstance(layer, _Loads):
        return
    if any(base.__name__ == "Linear8bitLt" for base in type(layer).__mro__):
        mix_in(layer, _Loads8bit, quant_format="int8", quant_double=False)
        return
    keep_unpacked(layer)
    # FSDP2 replaces the weight by a plain tensor. The layer then reads the constants from its own attribute.
    layer.quant_state = layer.weight.quant_state
    mix_in(layer, _Loads4bit, quant_format=layer.weight.quant_type, quant_double=layer.weight.compress_statistics)


def _quantized_weight(weight: Tensor, format: str, double_quant: bool) -> Any:
    import bitsandbytes as bnb

    if format == "int8":  # bitsandbytes' ``to`` quantises only weights that come from the CPU
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        return bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    how: Any = {"compress_statistics": double_quant, "quant_type": format}
    if weight.is_meta:
        with torch.device("cpu"):  # the first call creates the code table, which must not be a meta tensor
            bnb.functional.quantize_4bit(torch.zeros(64, dtype=torch.float32), **how)
        codes, state = bnb.functional.quantize_4bit(weight, **how)  # computes shapes only
    elif weight.device.type == "cpu" and weight.numel() > _PIECE:
        codes, state = _in_pieces(weight, format, double_quant)
    else:
        codes, state = bnb.functional.quantize_4bit(weight.contiguous(), **how)
    return bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **how)


def _in_pieces(weight: Tensor, format: str, double_quant: bool) -> tuple[Tensor, Any]:
    """Return the result of ``quantize_4bit``, computed for pieces of the weight.

    On the CPU one call needs 12 bytes of memory for each weight.
    """
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
    absmax = torch.empty(-(-weight.numel() // 64), dtype=torch.float32)
    state: Any
    for number, piece in enumerate(weight.reshape(-1).split(_PIECE)):
        made, state = quantize_4bit(piece, quant_type=format)
        codes[number * _PIECE // 2 :][: len(made)] = made
        absmax[number * _PIECE // 64 :][: len(state.absmax)] = state.absmax
    state.shape = weight.shape
    state.absmax = absmax
    if double_quant:
        state.nested = True
        state.offset = absmax.mean()
        state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=256)
    return codes, state


class _Loads(Loads, Moves):
    """Mix-in that loads the constants which bitsandbytes' layers save, and moves them with the layer."""

    weight: Any
    quant_format: str
    quant_double: bool

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Quantise a float weight of the checkpoint, or load the constants of a quantised one."""
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if given is not None and given.is_floating_point():
            if getattr(self, "quant_transposed", False):
                given = given.T
            given = given.to(self.weight.device).contiguous()
            fresh = _quantized_weight(given, self.quant_format, self.quant_double)
            self._take(fresh.data, fresh)
            state_dict[key] = fresh.data
        else:
            constants = [k for k in state_dict if k.startswith((f"{key}.", f"{prefix}SCB", f"{prefix}weight_format"))]
            popped = {k.removeprefix(f"{key}.").removeprefix(prefix): state_dict.pop(k) for k in constants}
            if given is not None and popped:
                self._restore(given, popped)

    def _take(self, data: Tensor, fresh: object) -> None:
        raise NotImplementedError

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        raise NotImplementedError


class _Constants4bit(_Loads):
    quant_state: Any

    def after_move(self) -> None:
        """Move the constants to the device of the weight."""
        if getattr(self.weight, "quant_state", None) is not None:
            self.quant_state = self.weight.quant_state
        # A weight of FSDP2 has no constants. Constants on the meta device are replaced when the weight is loaded.
        elif not self.quant_state.absmax.is_meta:
            self.quant_state.to(self.weight.device)

    def _take(self, data: Tensor, fresh: Any) -> None:
        self.weight.data = data
        self.quant_state = fresh.quant_state
        self.weight.quant_state = fresh.quant_state

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        self.weight.data = data.to(self.weight.device, copy=True)
        self.quant_state = state_4bit(constants, self.weight.device)
        self.weight.quant_state = self.quant_state


class Stack4bit(Saves, _Constants4bit, nn.Module):
    """Codes of stacked matrices [E, ...] with the name of the parameter that they replace. It has no forward.

    It is no ``nn.Linear``, so that nothing takes it for a layer that is called.

    Args:
        weight: Float weight.
        format: ``nf4`` or ``fp4``.
        double_quant: Quantise the scales as well.
    """

    def __init__(self, weight: Tensor, format: str, double_quant: bool) -> None:
        super().__init__()
        self.quant_format = format
        self.quant_double = double_quant
        self.weight = _quantized_weight(weight, format, double_quant)
        self.quant_state = self.weight.quant_state

    @property
    def shape(self) -> torch.Size:
        """Shape of the float weight."""
        return torch.Size(self.quant_state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the float weight."""
        dtype: torch.dtype = self.quant_state.dtype
        return dtype

    def after_save(self, destination: dict[str, Any], prefix: str) -> None:
        constants = self.quant_state.as_dict(packed=True)
        destination.update({f"{prefix}weight.{name}": tensor.detach() for name, tensor in constants.items()})


class _Loads4bit(_Constants4bit):
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's own output. float64 is computed in float32, because the CPU kernel gives wrong results.

        Under autocast the input gets autocast's dtype here. bitsandbytes multiplies in that dtype, too, but would
        return the output in the dtype of its input, and a float32 input is what norms give under autocast.
        """
        check_input(self, x)
        y: Tensor
        x = in_autocast_dtype(x)
        if x.dtype == torch.float64:
            y = super().forward(x.float())  # type: ignore[misc]
            return y.to(x.dtype)
        y = super().forward(x)  # type: ignore[misc]
        return y


class _Loads8bit(_Loads):
    state: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's own output, after a check of the input."""
        check_input(self, x)
        return super().forward(x)  # type: ignore[misc]  # of bitsandbytes' layer

    def after_move(self) -> None:
        """Move the scales to the device of the weight. A forward pass stores codes and scales in ``state`` as well."""
        for holder in (self.weight, self.state):
            if holder.CB is not None:
                holder.CB = self.weight.data
                holder.SCB = holder.SCB.to(self.weight.device)
        self.state.idx = None  # columns of outliers in the last input

    def before_load(self, state_dict: dict[str, object], prefix: str) -> None:
        self.after_move()  # a deep copy has two copies of the codes, of which only the weight's would be loaded
        super().before_load(state_dict, prefix)

    def _scale(self) -> Tensor:
        if self.weight.SCB is not None:
            return self.weight.SCB
        return self.state.SCB

    def _take(self, data: Tensor, fresh: Any) -> None:
        self._scale().copy_(fresh.SCB)

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        self._scale().copy_(constants["SCB"])


def state_4bit(constants: dict[str, Tensor], device: torch.device) -> object:
    """Return the quantisation constants of bitsandbytes from entries of a checkpoint.

    Args:
        constants: Tensors by the part of their names after ``weight.``.
        device: Device of the constants.
    """
    from bitsandbytes.functional import QuantState

    return QuantState.from_dict({f"weight.{name}": tensor.clone() for name, tensor in constants.items()}, device=device)

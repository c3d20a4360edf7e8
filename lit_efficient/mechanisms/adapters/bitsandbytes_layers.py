"""Bitsandbytes' frozen layers in 4 and 8 bits, made to load what they save.

nf4, fp4   w = absmax_block * table[code],  blocks of 64;  double_quant stores absmax in 8 bits, in blocks of 256
int8       w = absmax_row * code / 127
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked
from lit_efficient.internals.torch_modules import Loads, Moves
from lit_efficient.mechanisms.adapters.int4 import check_input
from lit_efficient.surgery import mix_in

_PIECE = 2**20  # weights that are quantised at once; whole blocks


def bitsandbytes_linear(
    weight: Tensor, bias: nn.Parameter | None, format: str = "nf4", *, double_quant: bool = True
) -> Any:
    """A quantised linear layer (``nf4``, ``fp4`` or ``int8``) with the given weight [out, in], which is left as it is,
    and the same bias parameter; with ``double_quant`` the scales of the 4-bit formats are quantised themselves.
    """
    import bitsandbytes as bnb

    sizes = (weight.shape[1], weight.shape[0], bias is not None)
    layer: Any
    if format == "int8":
        layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
    else:
        layer = bnb.nn.Linear4bit(*sizes, quant_type=format, device="meta", compress_statistics=double_quant)
    layer.weight = _quantized_weight(weight.detach(), format, double_quant)
    layer.bias = bias
    adopt(layer)
    return layer


def adopt(layer: Any) -> None:
    """Make any layer of bitsandbytes load what it saves and pass gradients on in eval mode."""
    if isinstance(layer, _Loads):
        return
    if any(base.__name__ == "Linear8bitLt" for base in type(layer).__mro__):
        mix_in(layer, _Loads8bit, quant_format="int8", quant_double=False)
        return
    keep_unpacked(layer)
    # FSDP2 puts plain tensors in the place of the weight; the layer then looks for the constants on itself.
    layer.quant_state = layer.weight.quant_state
    mix_in(layer, _Loads4bit, quant_format=layer.weight.quant_type, quant_double=layer.weight.compress_statistics)


def _quantized_weight(weight: Tensor, format: str, double_quant: bool) -> Any:
    import bitsandbytes as bnb

    if format == "int8":  # its own ``to`` quantises what comes from the CPU alone
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        return bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    how: Any = {"compress_statistics": double_quant, "quant_type": format}
    if weight.is_meta:
        with torch.device("cpu"):  # it keeps the table that the first call makes
            bnb.functional.quantize_4bit(torch.zeros(64, dtype=torch.float32), **how)
        codes, state = bnb.functional.quantize_4bit(weight, **how)  # of the shapes alone
    elif weight.device.type == "cpu" and weight.numel() > _PIECE:
        codes, state = _in_pieces(weight, format, double_quant)
    else:
        codes, state = bnb.functional.quantize_4bit(weight.contiguous(), **how)
    return bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **how)


def _in_pieces(weight: Tensor, format: str, double_quant: bool) -> tuple[Tensor, Any]:
    """What ``quantize_4bit`` gives: on the CPU it takes 12 bytes for each weight that it is given at once."""
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
    absmax = torch.empty(-(-weight.numel() // 64), dtype=torch.float32)  # whatever the default is now
    state: Any
    for number, piece in enumerate(weight.reshape(-1).split(_PIECE)):
        made, state = quantize_4bit(piece, quant_type=format)
        codes[number * _PIECE // 2 :][: len(made)] = made
        absmax[number * _PIECE // 64 :][: len(state.absmax)] = state.absmax
    state.shape, state.absmax = weight.shape, absmax
    if double_quant:
        state.nested, state.offset = True, absmax.mean()
        state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=256)
    return codes, state


class _Loads(Loads, Moves):
    """Loading and moving: bitsandbytes' layers neither read back the constants that they write nor take all along."""

    weight: Any
    quant_format: str
    quant_double: bool

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Quantise a float layer's weight, or take the constants out of the layer's own."""
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if given is not None and given.is_floating_point():
            oriented = given.T if getattr(self, "quant_transposed", False) else given
            fresh = _quantized_weight(
                oriented.to(self.weight.device).contiguous(), self.quant_format, self.quant_double
            )
            self._take(fresh.data, fresh)
            state_dict[key] = fresh.data
        else:
            constants = [k for k in state_dict if k.startswith((f"{key}.", f"{prefix}SCB", f"{prefix}weight_format"))]
            popped = {k.removeprefix(f"{key}.").removeprefix(prefix): state_dict.pop(k) for k in constants}
            if given is not None and popped:
                self._restore(given, popped)

    def _take(self, data: Tensor, fresh: Any) -> None:
        raise NotImplementedError

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        raise NotImplementedError


class _Loads4bit(_Loads):
    quant_state: Any

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output; float64 goes through float32, since the kernel for CPUs misreads it in silence."""
        check_input(self, x)
        y: Tensor = super().forward(x.float() if x.dtype == torch.float64 else x)  # type: ignore[misc]
        return y.to(x.dtype) if x.dtype == torch.float64 else y

    def after_move(self) -> None:
        """The weight has moved its constants, or is one of FSDP2's, which has none."""
        if getattr(self.weight, "quant_state", None) is not None:
            self.quant_state = self.weight.quant_state
        elif not self.quant_state.absmax.is_meta:  # else they come with the weight
            self.quant_state.to(self.weight.device)

    def _take(self, data: Tensor, fresh: Any) -> None:
        self.weight.data = data
        self.weight.quant_state = self.quant_state = fresh.quant_state

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        self.weight.data = data.to(self.weight.device, copy=True)
        self.weight.quant_state = self.quant_state = state_4bit(constants, self.weight.device)


class _Loads8bit(_Loads):
    state: Any

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output."""
        check_input(self, x)
        y: Tensor = super().forward(x)  # type: ignore[misc]  # of bitsandbytes' layer
        return y

    def after_move(self) -> None:
        """The codes are the weight's own, the scales go where it is; a forward has put both on ``state``."""
        for holder in (self.weight, self.state):
            if holder.CB is not None:
                holder.CB, holder.SCB = self.weight.data, holder.SCB.to(self.weight.device)

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        self.after_move()  # a deep copy has codes twice, and only the weight's are loaded
        super().before_load(state_dict, prefix)

    def _scale(self) -> Tensor:
        return self.weight.SCB if self.weight.SCB is not None else self.state.SCB

    def _take(self, data: Tensor, fresh: Any) -> None:
        self._scale().copy_(fresh.SCB)

    def _restore(self, data: Tensor, constants: dict[str, Tensor]) -> None:
        self._scale().copy_(constants["SCB"])


def state_4bit(constants: dict[str, Tensor], device: torch.device) -> Any:
    """Bitsandbytes' quantisation constants from a checkpoint's, by their names behind ``weight.``."""
    from bitsandbytes.functional import QuantState

    return QuantState.from_dict({f"weight.{name}": tensor.clone() for name, tensor in constants.items()}, device=device)

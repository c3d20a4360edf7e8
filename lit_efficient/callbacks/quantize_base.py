"""Quantised base weights (QLoRA's half): frozen linear layers in 4 or 8 bits, computed with in floats.

    nf4, fp4   w = absmax_block * table[code],  blocks of 64;  double_quant stores absmax in 8 bits, in blocks of 256
    int8       w = absmax_row * code / 127

Saves: 3.48 of 4 bytes a float32 weight (0.52 left; 0.56 without double quantisation; int8 1.0)
Costs: dequantising in each forward and backward pass; the rounding of the base
Source: Dettmers et al. (2023), https://arxiv.org/abs/2305.14314; int8: https://arxiv.org/abs/2208.07339; bitsandbytes
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Phase, Report, Technique

FORMATS = ("nf4", "fp4", "int8")


class QuantizeBase(Technique):
    """Store the weights of the linear layers in 4 or 8 bits and freeze them; put ``LoRA`` beside it to train (QLoRA).

    Names stay. Checkpoints of either kind load: quantised ones as they are, and those of the float base, which are
    quantised on the way. Layers that share their weight with another one stay as they are.

    Args:
        format: ``nf4`` (4 bits, for normally distributed weights), ``fp4`` or ``int8``.
        double_quant: Whether the scales of the 4-bit formats are quantised themselves.
        skip: Regular expressions for the ends of dotted names of layers that stay as they are; none need match.

    Raises:
        ConfigurationError: For another format, for a pattern that is no regular expression, and without such layers.

    Example:
        >>> Trainer(callbacks=[QuantizeBase(), LoRA(rank=16)])  # doctest: +SKIP
    """

    phase = Phase.QUANTIZE
    alters = ("weights",)
    conflicts: ClassVar[dict[str, str]] = {
        "WeightAveraging": "it averages the codes of quantised weights as if they were numbers; use EMA",
    }

    def __init__(self, format: str = "nf4", double_quant: bool = True, skip: tuple[str, ...] = ("lm_head",)) -> None:
        super().__init__()
        if format not in FORMATS:
            raise ConfigurationError(f"QuantizeBase: format must be one of {', '.join(FORMATS)}; got {format!r}")
        for pattern in skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigurationError(
                    f"QuantizeBase: skip must hold regular expressions, got {pattern!r}: {error}"
                ) from error
        self.format = format
        self.double_quant = double_quant
        self.skip = tuple(skip)

    def transform(self, module: nn.Module) -> Report:
        """Put a quantised layer in the place of each linear one."""
        uses: dict[int, int] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        found = [
            (name, part)
            for name, part in module.named_modules()
            if type(part) is nn.Linear and name and uses[id(part.weight)] == 1 and not self._skips(name)
        ]
        if not found:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} has no torch.nn.Linear left to quantise (skip={self.skip})"
            )
        if any(linear.weight.device.type == "meta" for _, linear in found):
            raise ConfigurationError("QuantizeBase: weights are on the meta device: give the base its weights first")
        before = sum(linear.weight.nbytes for _, linear in found)
        elements = sum(linear.weight.numel() for _, linear in found)
        after = 0
        for name, linear in found:
            layer = quantize_linear(linear, self.format, double_quant=self.double_quant)
            after += stored_bytes(layer)
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, layer)
        return Report(
            f"{len(found)} linear layers in {self.format}: {after / elements:.3f} bytes a weight, was "
            f"{before / elements:.3f}; {(before - after) / 2**20:.1f} MiB saved",
            modules=tuple(name for name, _ in found),
            parameters=elements,
            bytes_saved=before - after,
            details={"bytes_per_parameter": after / elements},
        )

    def _skips(self, name: str) -> bool:
        return any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for pattern in self.skip)


def quantize_linear(linear: nn.Linear, format: str = "nf4", *, double_quant: bool = True) -> nn.Linear:
    """Bitsandbytes' quantised twin of a linear layer, frozen, with the same bias parameter.

    Args:
        linear: A layer with float weights [out, in]; it is left as it was.
        format: ``nf4``, ``fp4`` or ``int8``.
        double_quant: Whether the scales of the 4-bit formats are quantised themselves.
    """
    import bitsandbytes as bnb

    layer: Any
    if format == "int8":
        layer = bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, device="meta"
        )
    else:
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, quant_type=format, device="meta",
            compress_statistics=double_quant,
        )  # fmt: skip
        layer.support_avx512bf16_for_cpu = False  # its repacking in eval mode loses the gradient of the input
    layer.weight = _quantized_weight(linear.weight.detach(), format, double_quant)
    layer.bias = linear.bias
    mix_in(layer, _Loads8bit if format == "int8" else _Loads4bit, quant_format=format, quant_double=double_quant)
    return layer.train(linear.training)


def _quantized_weight(weight: torch.Tensor, format: str, double_quant: bool) -> Any:
    import bitsandbytes as bnb

    if format == "int8":
        codes: Any = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
        return codes.to(weight.device)
    parameter: Any = bnb.nn.Params4bit(
        weight.clone(), requires_grad=False, compress_statistics=double_quant, quant_type=format
    )
    return parameter.to(weight.device)


def stored_bytes(layer: Any) -> int:
    """Bytes of a quantised layer's weight, scales and tables included."""
    state = layer.weight.quant_state if layer.quant_format != "int8" else None
    if state is None:
        return layer.weight.nbytes + layer.weight.SCB.nbytes
    return layer.weight.nbytes + sum(t.nbytes for t in state.as_dict(packed=True).values())


class _Loads:
    """Loading: bitsandbytes' layers cannot read back the constants that they write."""

    weight: Any
    quant_format: str
    quant_double: bool

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if given is not None and given.is_floating_point():
            fresh = _quantized_weight(given.to(self.weight.device), self.quant_format, self.quant_double)
            self._take(fresh.data, fresh)
            state_dict[key] = fresh.data
        else:
            constants = [k for k in state_dict if k.startswith((f"{key}.", f"{prefix}SCB", f"{prefix}weight_format"))]
            popped = {k.removeprefix(f"{key}.").removeprefix(prefix): state_dict.pop(k) for k in constants}
            if given is not None and popped:
                self._restore(given, popped)
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]

    def _take(self, data: torch.Tensor, fresh: Any) -> None:
        raise NotImplementedError

    def _restore(self, data: torch.Tensor, constants: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


class _Loads4bit(_Loads):
    quant_state: Any

    def _take(self, data: torch.Tensor, fresh: Any) -> None:
        self.weight.data = data
        self.weight.quant_state = self.quant_state = fresh.quant_state

    def _restore(self, data: torch.Tensor, constants: dict[str, torch.Tensor]) -> None:
        from bitsandbytes.functional import QuantState

        device = self.weight.device
        self.weight.data = data.to(device, copy=True)
        self.weight.quant_state = self.quant_state = QuantState.from_dict(
            {f"weight.{name}": tensor.clone() for name, tensor in constants.items()}, device=device
        )


class _Loads8bit(_Loads):
    state: Any

    def _scale(self) -> torch.Tensor:
        return self.weight.SCB if self.weight.SCB is not None else self.state.SCB

    def _take(self, data: torch.Tensor, fresh: Any) -> None:
        self._scale().copy_(fresh.SCB)

    def _restore(self, data: torch.Tensor, constants: dict[str, torch.Tensor]) -> None:
        self._scale().copy_(constants["SCB"])

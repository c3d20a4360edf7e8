"""Quantised base weights (QLoRA's half): frozen linear layers in 4 or 8 bits, computed with in floats.

    nf4, fp4   w = absmax_block * table[code],  blocks of 64;  double_quant stores absmax in 8 bits, in blocks of 256
    int8       w = absmax_row * code / 127
    int4       w = scale_group * (code - zero_group),  groups of 32 inputs in a row: what QA-LoRA merges into

Saves: 3.48 of 4 bytes a float32 weight (0.52 left; 0.56 without double quantisation; int4 0.75, int8 1.0)
Costs: dequantising in each forward and backward pass; the rounding of the base
Source: Dettmers et al. (2023), https://arxiv.org/abs/2305.14314; int8: https://arxiv.org/abs/2208.07339; bitsandbytes
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_installed, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.adapters.quantized import (
    FORMATS,
    is_conv1d,
    is_quantized,
    quantization_of,
    quantize_linear,
    stored_bytes,
)
from lit_efficient.models.read_weights import cast_to, read_layers
from lit_efficient.surgery import call_layers, expert_stacks, name_pattern
from lit_efficient.technique import Technique


class QuantizeBase(Technique):
    """Store the weights of the linear layers in 4 or 8 bits and freeze them; put ``LoRA`` beside it to train (QLoRA).

    Quantises ``nn.Linear`` and GPT-2's ``Conv1D``. Names stay. Checkpoints of either kind load: quantised ones as they
    are, and those of the float base, which are quantised on the way. Layers that share their weight with another one
    stay as they are, and those whose weight the modules around them read: to multiply by it (Mamba's ``dt_proj``) or to
    cast to its type (T5's ``wo``). A model that transformers has loaded in 4 or 8 bits already needs ``LoRA`` alone.

    Args:
        format: ``nf4`` (4 bits, for normally distributed weights), ``fp4``, ``int8``, or ``int4`` (for
            ``LoRA(variant="qalora")``, which merges into it).
        double_quant: Whether the scales of nf4 and fp4 are quantised themselves.
        skip: Regular expressions for the ends of dotted names of layers that stay as they are; none need match.
        group_size: For int4, how many inputs share a scale and a zero point: even; must divide those of every layer.

    Raises:
        ConfigurationError: For an argument out of range, for a pattern that is no regular expression, without layers to
            quantise, and for a model that is quantised already.
    """

    phase = Phase.QUANTIZE
    alters = ("weights",)
    conflicts: ClassVar[dict[str, str]] = {
        "WeightAveraging": "it averages the codes of quantised weights as if they were numbers; use EMA"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (0, "frozen weights in 4 or 8 bits, below adapters")}

    def __init__(
        self, format: str = "nf4", double_quant: bool = True, skip: tuple[str, ...] = ("lm_head",), group_size: int = 32
    ) -> None:
        super().__init__()
        check_choice("QuantizeBase", "format", format, FORMATS)
        for pattern in skip:
            name_pattern(pattern, "QuantizeBase: skip")
        check_number("QuantizeBase", "group_size", group_size, least=2, whole=True)
        if group_size % 2:
            raise refusal("QuantizeBase", "group_size", "even", group_size)
        if format != "int4":
            check_installed(f"QuantizeBase(format={format!r})", "bitsandbytes")
        self.format = format
        self.double_quant = double_quant
        self.skip = tuple(skip)
        self.group_size = group_size

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse int8 under FSDP2: bitsandbytes keeps its scales on the parameter, which sharding replaces."""
        traits = traits_of(trainer.strategy)
        if self.format == "int8" and traits.shards:
            raise ConflictError(
                "QuantizeBase: format='int8' cannot be sharded: its scales stand on the parameter, which "
                f"{traits.name} replaces; use nf4, fp4 or int4, or strategy='ddp'"
            )

    def transform(self, module: nn.Module) -> Report:
        read = self._read_elsewhere(module)
        found = self._layers(module, read)
        device = torch.get_default_device()  # in configure_model the trainer's
        before = elements = after = 0
        for name in found:  # nothing holds a float layer that is done
            owner, _, last = name.rpartition(".")
            linear: Any = module.get_submodule(name)
            before, elements = before + linear.weight.nbytes, elements + linear.weight.numel()
            layer = quantize_linear(
                linear,
                self.format,
                double_quant=self.double_quant,
                group_size=self.group_size,
                device=None if device.type in ("cpu", "meta") else device,
            )
            after += stored_bytes(layer)
            setattr(module.get_submodule(owner), last, layer)
        call_layers(module)
        left = sum(getattr(part, key).nbytes for _, part, keys in expert_stacks(module) for key in keys)
        aside = f"; the stacked weights of experts stay as they are, {left / 2**20:.1f} MiB" if left else ""
        if read:
            aside += f"; {len(read)} layers stay as they are, whose weight other code reads: {', '.join(read[:3])}"
            aside += ", ..." if len(read) > 3 else ""
        return Report(
            f"{len(found)} linear layers in {self.format}: {after / elements:.3f} bytes a weight, was "
            f"{before / elements:.3f}; {(before - after) / 2**20:.1f} MiB saved{aside}",
            modules=tuple(found),
            parameters=elements,
            bytes_saved=before - after,
            details={"bytes_per_parameter": after / elements, "bytes_of_experts": left},
        )

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        checkpoint["lit_efficient"]["quantized"] = quantization_of(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(is_quantized(part) for part in module.modules())

    def _read_elsewhere(self, module: nn.Module) -> list[str]:
        read = {f"{prefix}{name}" for prefix, make in _recipes(module) for name in read_layers(make)}
        read |= set(cast_to(module))
        return [n for n, part in module.named_modules() if n in read and _is_linear(part) and not self._skips(n)]

    def _layers(self, module: nn.Module, read: list[str]) -> list[str]:
        done = [name for name, part in module.named_modules() if is_quantized(part)]
        if done:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} is quantised already: {len(done)} layers, first {done[0]!r}; "
                "leave QuantizeBase out (LoRA trains beside such layers as they are), or load the float weights"
            )
        uses: dict[int, int] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        found: list[tuple[str, Any]] = [
            (name, part)
            for name, part in module.named_modules()
            if _is_linear(part)
            and name and uses[id(part.weight)] == 1 and not self._skips(name) and name not in read
        ]  # fmt: skip
        if not found:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} has no torch.nn.Linear left to quantise (skip={self.skip})"
            )
        if any(layer.weight.device.type == "meta" for _, layer in found):
            raise ConfigurationError("QuantizeBase: weights are on the meta device: give the base its weights first")
        inputs = {name: part.weight.shape[0 if is_conv1d(part) else 1] for name, part in found}
        odd = {name: size for name, size in inputs.items() if size % self.group_size}
        if self.format == "int4" and odd:
            name, size = next(iter(odd.items()))
            raise ConfigurationError(
                f"QuantizeBase: group_size must divide the inputs of every layer, got {self.group_size} for the {size} "
                f"of {name!r} and {len(odd) - 1} more; {math.gcd(*inputs.values())} divides all, or name them in skip"
            )
        return [name for name, _ in found]

    def _skips(self, name: str) -> bool:
        return any(name_pattern(pattern, "QuantizeBase: skip").fullmatch(name) for pattern in self.skip)


def _is_linear(part: nn.Module) -> bool:
    return type(part) is nn.Linear or is_conv1d(part)


def _recipes(module: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Where the causal models of transformers stand in a module, and what makes each anew."""
    for name, part in module.named_modules():
        if callable(getattr(part, "prepare_inputs_for_generation", None)):
            kinds = [kind for kind in type(part).__mro__ if kind.__module__.startswith("transformers.models.")]
            if kinds:
                yield f"{name}." if name else "", partial(kinds[0], copy.deepcopy(part.config))

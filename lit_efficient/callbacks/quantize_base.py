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
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lit_efficient.application.checkpoints import CheckpointHooks
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
from lit_efficient.mechanisms.blocks.block_map import note_trained
from lit_efficient.models.networks.expert_layers import ExpertLinear
from lit_efficient.models.probes.read_weights import cast_to, read_layers
from lit_efficient.surgery import call_layers, expert_stacks, name_pattern, weights_wait
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class QuantizeBase(CheckpointHooks, Technique):
    """Store the weights of the linear layers in 4 or 8 bits and freeze them; put ``LoRA`` beside it to train (QLoRA).

    Quantises ``nn.Linear``, GPT-2's ``Conv1D`` and layers of ``MixtureOfExperts``. Names stay. Checkpoints of either
    kind load: quantised ones as they are, and those of the float base, which are quantised on the way. Layers that
    share their weight with another one stay as they are, and those whose weight the modules around them read: to
    multiply by it (Mamba's ``dt_proj``) or to cast to its type (T5's ``wo``). Where no technique acts before,
    ``LanguageModeling`` reads a base's files through this one: each layer is quantised as soon as it is read, on the
    run's device, so that no more than one is in memory as floats. A model that transformers has loaded in 4 or 8 bits
    already needs ``LoRA`` alone.

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
    traits = frozenset({Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS})
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
        self._early: list[tuple[nn.Module, int, int]] = []  # twins made while weights were read; bytes, weights before

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse int8 under FSDP2: bitsandbytes keeps its scales on the parameter, which sharding replaces."""
        traits = traits_of(trainer.strategy)
        if self.format == "int8" and traits.shards:
            raise ConflictError(
                "QuantizeBase: format='int8' cannot be sharded: its scales stand on the parameter, which "
                f"{traits.name} replaces; use nf4, fp4 or int4, or strategy='ddp'"
            )

    def on_read(self, prefix: str) -> "_OnRead":
        return _OnRead(self, prefix)

    def transform(self, module: nn.Module) -> Report:
        note_trained(module)
        read = self._read_elsewhere(module)
        early, self._early = self._early, []
        names = {id(part): name for name, part in module.named_modules()}
        made = {names[id(twin)]: sizes for twin, *sizes in early if id(twin) in names}
        found = self._layers(module, read, made)
        device = torch.get_default_device()  # in configure_model the trainer's
        before = sum(sizes[0] for sizes in made.values())
        elements = sum(sizes[1] for sizes in made.values())
        after = sum(stored_bytes(module.get_submodule(name)) for name in made)
        for name in found:  # nothing holds a float layer that is done
            owner, _, last = name.rpartition(".")
            linear: Any = module.get_submodule(name)
            before, elements = before + linear.weight.nbytes, elements + linear.weight.numel()
            layer = self._quantized(linear, None if device.type in ("cpu", "meta") else device)
            after += stored_bytes(layer)
            setattr(module.get_submodule(owner), last, layer)
        call_layers(module)
        left = sum(
            getattr(part, key).nbytes
            for _, part, keys in expert_stacks(module)
            for key in keys
            if not is_quantized(part)
        )
        aside = f"; the stacked weights of experts stay as they are, {left / 2**20:.1f} MiB" if left else ""
        if read:
            aside += f"; {len(read)} layers stay as they are, whose weight other code reads: {', '.join(read[:3])}"
            aside += ", ..." if len(read) > 3 else ""
        found = [name for name in names.values() if name in {*found, *made}]
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

    def _quantized(self, linear: Any, device: torch.device | None = None) -> Any:
        double_quant, group_size = self.double_quant, self.group_size
        return quantize_linear(linear, self.format, double_quant=double_quant, group_size=group_size, device=device)

    def _candidates(self, module: nn.Module, read: list[str], prefix: str = "") -> list[tuple[str, Any]]:
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        return [
            (name, part)
            for name, part in module.named_modules()
            if _is_linear(part) and not is_quantized(part)
            and name and uses[id(part.weight)] == 1 and not self._skips(f"{prefix}{name}") and name not in read
        ]  # fmt: skip

    def _odd(self, inputs: dict[str, int]) -> dict[str, int]:
        """Those that the groups of int4 do not divide."""
        return {name: n for name, n in inputs.items() if self.format == "int4" and n % self.group_size}

    def _layers(self, module: nn.Module, read: list[str], made: Container[str] = ()) -> list[str]:
        done = [name for name, part in module.named_modules() if is_quantized(part) and name not in made]
        if done:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} is quantised already: {len(done)} layers, first {done[0]!r}; "
                "leave QuantizeBase out (LoRA trains beside such layers as they are), or load the float weights"
            )
        found = self._candidates(module, read)
        if not found and not made:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} has no torch.nn.Linear left to quantise (skip={self.skip})"
            )
        if any(layer.weight.device.type == "meta" for _, layer in found) and not weights_wait(module):
            raise ConfigurationError("QuantizeBase: weights are on the meta device: give the base its weights first")
        inputs = _inputs(found)
        if odd := self._odd(inputs):
            name, size = next(iter(odd.items()))
            raise ConfigurationError(
                f"QuantizeBase: group_size must divide the inputs of every layer, got {self.group_size} for the {size} "
                f"of {name!r} and {len(odd) - 1} more; {math.gcd(*inputs.values())} divides all, or name them in skip"
            )
        return [name for name, _ in found]

    def _skips(self, name: str) -> bool:
        return any(name_pattern(pattern, "QuantizeBase: skip").fullmatch(name) for pattern in self.skip)


class _OnRead:
    """Quantises the layers of a causal model of transformers as they are read: see `Replacing`."""

    def __init__(self, technique: QuantizeBase, prefix: str) -> None:
        self.technique, self.prefix = technique, prefix
        self.bytes_per_weight = {"int8": 1.0, "int4": 0.75}.get(technique.format, 0.5625)
        technique._early = []

    def chosen(self, network: nn.Module) -> set[str]:
        found = self.technique._candidates(network, self.technique._read_elsewhere(network), self.prefix)
        return set() if self.technique._odd(_inputs(found)) else {name for name, _ in found}

    def replaced(self, layer: Any) -> nn.Module:
        twin: nn.Module = self.technique._quantized(layer)
        self.technique._early.append((twin, layer.weight.nbytes, layer.weight.numel()))
        return twin


def _inputs(found: list[tuple[str, Any]]) -> dict[str, int]:
    return {name: part.weight.shape[-2 if _is_transposed(part) else -1] for name, part in found}


def _is_transposed(part: nn.Module) -> bool:
    return part.is_transposed if isinstance(part, ExpertLinear) else is_conv1d(part)


def _is_linear(part: nn.Module) -> bool:
    return type(part) in (nn.Linear, ExpertLinear) or is_conv1d(part)


def _recipes(module: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Where the causal models of transformers stand in a module, and what makes each anew."""
    for name, part in module.named_modules():
        if callable(getattr(part, "prepare_inputs_for_generation", None)):
            kinds = [kind for kind in type(part).__mro__ if kind.__module__.startswith("transformers.models.")]
            if kinds:
                yield f"{name}." if name else "", partial(kinds[0], copy.deepcopy(part.config))

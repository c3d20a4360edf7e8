"""Quantised base weights (QLoRA without its adapters): store frozen linear layers in 4 or 8 bits, compute in floats.

    nf4, fp4   w = absmax_block * table[code],  blocks of 64;  double_quant stores absmax in 8 bits, in blocks of 256
    int8       w = absmax_row * code / 127
    int4       w = scale_group * (code - zero_group),  groups of 32 inputs in a row, into which QA-LoRA merges

Saves: 3.48 of the 4 bytes of a float32 weight (0.52 remain; 0.56 without double quantisation; int4 0.75, int8 1.0)
Costs: dequantisation in each forward and backward pass; rounding errors of the base
Source: Dettmers et al. (2023), https://arxiv.org/abs/2305.14314; int8: https://arxiv.org/abs/2208.07339; bitsandbytes
"""

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import (
    ConfigurationError,
    ConflictError,
    check_choice,
    check_installed,
    check_number,
    listed,
    refusal,
)
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.adapters.quantized import (
    FORMATS,
    SOURCE,
    is_conv1d,
    is_quantized,
    is_stack,
    quantization_of,
    quantize_linear,
    stored_bytes,
)
from lit_efficient.mechanisms.adapters.stacked_codes import quantize_stack
from lit_efficient.mechanisms.blocks.block_map import note_trained
from lit_efficient.models.networks.grouped_linear import ExpertLinear, GroupedLayer
from lit_efficient.models.probes.read_weights import acts_as_linear, cast_to, read_elsewhere
from lit_efficient.surgery import call_layers, expert_stacks, name_pattern, weights_wait
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class QuantizeBase(CheckpointHooks, Technique):
    """Store the weights of linear layers in 4 or 8 bits and freeze them. Add ``LoRA`` to train adapters (QLoRA).

    Quantised are ``nn.Linear`` and layers that compute the same (Falcon's, GPT-2's ``Conv1D``), and layers of
    ``MixtureOfExperts``. Names stay the same. Quantised checkpoints and checkpoints of the float base can be loaded;
    the latter are quantised while loading. Not changed are layers that share their weight with another layer, and
    layers whose weight other modules read, to multiply by it (Mamba's ``dt_proj``) or to cast to its type (T5's
    ``wo``). The stacked weights of experts of transformers are quantised with ``experts``.

    If no technique acts earlier, ``LanguageModeling`` quantises each layer of a base as soon as it is read from a file,
    on the run's device, so that at most one layer is in memory as floats. A model that transformers has already loaded
    in 4 or 8 bits needs only ``LoRA``.

    Args:
        format: ``nf4`` (4 bits, for normally distributed weights), ``fp4``, ``int8``, or ``int4`` (for
            ``LoRA(variant="qalora")``, which merges into it).
        double_quant: Also quantise the scales of nf4 and fp4.
        skip: Regular expressions for the ends of dotted names of layers that are not changed. A pattern need not match.
        group_size: For int4, the number of inputs that share a scale and a zero point. It must be even and divide the
            number of inputs of each layer.
        keep_source: Keep the weights as they were before in host memory until ``LoRA(variant="loftq")`` has started
            from them.
        experts: Also quantise stacked weights of experts, such as Mixtral's ``experts.gate_up_proj``, in nf4 or fp4.
            They are floats only while their module computes, and again for its backward pass: autograd stores which
            weight it needs, and neither recomputation nor offloading sees one. Adapt them by
            ``LoRA(targets="all-linear+experts")``.

    Raises:
        ConfigurationError: For an argument out of range, for a pattern that is not a regular expression, if there are
            no layers to quantise, and for a model that is already quantised.
        ConflictError: For int8 with a strategy that shards parameters.
    """

    phase = Phase.QUANTIZE
    traits = frozenset({Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS})
    alters = ("weights",)
    conflicts: ClassVar[dict[str, str]] = {
        "WeightAveraging": "it would average the codes of quantised weights as if they were numbers; use EMA"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (0, "frozen weights in 4 or 8 bits, with adapters")}

    def __init__(
        self,
        format: str = "nf4",
        double_quant: bool = True,
        skip: tuple[str, ...] = ("lm_head",),
        group_size: int = 32,
        keep_source: bool = False,
        experts: bool = False,
    ) -> None:
        super().__init__()
        check_choice("QuantizeBase", "format", format, FORMATS)
        for pattern in skip:
            name_pattern(pattern, "QuantizeBase: skip")
        check_number("QuantizeBase", "group_size", group_size, least=2, whole=True)
        if group_size % 2:
            raise refusal("QuantizeBase", "group_size", "even", group_size)
        if experts and format not in ("nf4", "fp4"):
            raise refusal("QuantizeBase", "experts", f"false for format {format}; nf4 and fp4 quantise experts", True)
        if format != "int4":
            check_installed(f"QuantizeBase(format={format!r})", "bitsandbytes")
        self.format = format
        self.double_quant = double_quant
        self.skip = tuple(skip)
        self.group_size = group_size
        self.keep_source = keep_source
        self.experts = experts
        # Layers that were quantised while files were read, with the number of bytes and of weights before.
        self._early: list[tuple[nn.Module, int, int]] = []

    def check(self, trainer: Any, module: nn.Module) -> None:
        """Refuse int8 with FSDP2: bitsandbytes stores its scales on the parameter, which sharding replaces."""
        traits = traits_of(trainer.strategy)
        if self.format == "int8" and traits.shards:
            raise ConflictError(
                "QuantizeBase: format='int8' cannot be sharded, because its scales are stored on the parameter, which "
                f"{traits.name} replaces. Use nf4, fp4 or int4, or strategy='ddp'"
            )

    def on_read(self, prefix: str) -> "_OnRead":
        return _OnRead(self, prefix)

    def transform(self, module: nn.Module) -> Report:
        note_trained(module)
        read = self._read_elsewhere(module)
        names = {id(part): name for name, part in module.named_modules()}
        made: set[str] = set()  # names of the layers that were quantised while files were read
        before = 0  # bytes of the weights as floats
        elements = 0
        after = 0  # bytes as stored
        for layer, size, number in self._early:
            if id(layer) in names:
                made.add(names[id(layer)])
                before += size
                elements += number
                after += stored_bytes(layer)
        self._early = []
        stacks = self._stacks(module)
        found = self._layers(module, read, made, stacks)
        device = torch.get_default_device()  # in configure_model this is the trainer's device
        # A loop over names, so that no variable holds a float layer that has been replaced.
        for name in found:
            owner, _, last = name.rpartition(".")
            linear: Any = module.get_submodule(name)
            before += linear.weight.nbytes
            elements += linear.weight.numel()
            # None keeps the layer on its device.
            layer = self._quantized(linear, None if device.type in ("cpu", "meta") else device)
            after += stored_bytes(layer)
            setattr(module.get_submodule(owner), last, layer)
        for name in stacks:
            owner, _, last = name.rpartition(".")
            part = module.get_submodule(owner)
            before += getattr(part, last).nbytes
            elements += getattr(part, last).numel()
            after += stored_bytes(self._quantized_stack(part, last, None if device.type in ("cpu", "meta") else device))
        call_layers(module)
        left = 0
        for _, part, keys in expert_stacks(module):
            if not is_quantized(part):
                left += sum(getattr(part, key).nbytes for key in keys if not is_quantized(getattr(part, key)))
        changed = made.union(found, stacks)
        stacked = sum(is_stack(module.get_submodule(name)) for name in changed)
        summary = f"{len(changed) - stacked} linear layers"
        if stacked:
            summary += f" and {stacked} stacks of experts"
        summary += f" in {self.format}: {after / elements:.3f} bytes a weight, was {before / elements:.3f}"
        summary += f"; {format_bytes(before - after)} saved"
        if left:
            summary += f"; the stacked weights of experts are not changed, {format_bytes(left)} (see experts)"
        if read:
            summary += f"; {len(read)} layers are not changed, because other code reads their weights: {listed(read)}"
        return Report(
            summary,
            modules=tuple(name for name, _ in module.named_modules() if name in changed),
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
        """Return the names of linear layers whose weight other modules read."""
        read = {*read_elsewhere(module), *cast_to(module)}
        return [n for n, part in module.named_modules() if n in read and _is_linear(part) and not self._skips(n)]

    def _quantized(self, linear: nn.Module, device: torch.device | None = None) -> Any:
        layer: Any = quantize_linear(
            linear, self.format, double_quant=self.double_quant, group_size=self.group_size, device=device
        )
        if self.keep_source and not isinstance(linear, ExpertLinear):
            weight: torch.Tensor = linear.weight.detach()  # type: ignore[operator]
            layer.__dict__[SOURCE] = (weight.T if is_conv1d(linear) else weight).to("meta" if weight.is_meta else "cpu")
        return layer

    def _quantized_stack(self, part: nn.Module, key: str, device: torch.device | None = None) -> Any:
        return quantize_stack(part, key, self.format, self.double_quant, device)

    def _stacks(self, module: nn.Module, prefix: str = "") -> list[str]:
        """Return the names of the stacked parameters to quantise; ``prefix`` is the name of ``module`` itself."""
        if not self.experts:
            return []
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        found: list[str] = []
        for name, part, keys in expert_stacks(module):
            if isinstance(part, GroupedLayer) or self._skips(f"{prefix}{name}"):
                continue
            for key in (key for key in keys if not is_quantized(getattr(part, key))):
                full = f"{name}.{key}".lstrip(".")
                if uses[id(getattr(part, key))] == 1 and not self._skips(f"{prefix}{full}"):
                    found.append(full)
        return found

    def _candidates(self, module: nn.Module, read: list[str], prefix: str = "") -> list[tuple[str, Any]]:
        """Return the names and modules of the layers to quantise; ``prefix`` is the name of ``module`` itself."""
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        found: list[tuple[str, object]] = []
        for name, part in module.named_modules():
            if not name or name in read or not _is_linear(part) or is_quantized(part):
                continue
            if uses[id(part.weight)] == 1 and not self._skips(f"{prefix}{name}"):
                found.append((name, part))
        return found

    def _indivisible(self, inputs: dict[str, int]) -> dict[str, int]:
        """Return the layers, with their numbers of inputs, that the groups of int4 do not divide."""
        if self.format != "int4":
            return {}
        return {name: number for name, number in inputs.items() if number % self.group_size}

    def _layers(
        self, module: nn.Module, read: list[str], made: Collection[str] = (), stacks: Collection[str] = ()
    ) -> list[str]:
        """Return the names of the layers to quantise, after checking that all of them can be quantised.

        Args:
            module: The network.
            read: Names of layers whose weight other modules read.
            made: Names of layers that have been quantised while files were read.
            stacks: Names of stacked parameters that will be quantised.
        """
        done = [name for name, part in module.named_modules() if is_quantized(part) and name not in made]
        if done:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} is already quantised: {len(done)} layers, first {done[0]!r}. "
                "Leave out QuantizeBase (LoRA supports such layers), or load the float weights"
            )
        found = self._candidates(module, read)
        if self.experts and not stacks and not any(is_stack(module.get_submodule(name)) for name in made):
            raise ConfigurationError(
                f"QuantizeBase: experts=True finds no stacked weights of experts in {type(module).__name__} "
                f"(skip={self.skip}). Leave experts out; layers of MixtureOfExperts are quantised without it"
            )
        if not found and not made and not stacks:
            raise ConfigurationError(
                f"QuantizeBase: {type(module).__name__} has no torch.nn.Linear left to quantise (skip={self.skip})"
            )
        floats = [*(layer.weight for _, layer in found), *map(module.get_parameter, stacks)]
        if any(weight.is_meta for weight in floats) and not weights_wait(module):
            raise ConfigurationError("QuantizeBase: weights are on the meta device. Load the base's weights first")
        inputs = _inputs(found)
        wrong = self._indivisible(inputs)
        if wrong:
            name, size = next(iter(wrong.items()))
            raise ConfigurationError(
                f"QuantizeBase: group_size must divide the inputs of every layer, got {self.group_size} for the {size} "
                f"of {name!r} and {len(wrong) - 1} more. {math.gcd(*inputs.values())} divides all; or name these "
                "layers in skip"
            )
        return [name for name, _ in found]

    def _skips(self, name: str) -> bool:
        return any(name_pattern(pattern, "QuantizeBase: skip").fullmatch(name) for pattern in self.skip)


class _OnRead:
    """Quantises the layers of a causal model of transformers while they are read from files; see `Replacing`."""

    def __init__(self, technique: QuantizeBase, prefix: str) -> None:
        self.technique = technique
        self.prefix = prefix
        self.bytes_per_weight = {"int8": 1.0, "int4": 0.75}.get(technique.format, 0.5625)
        technique._early = []

    def chosen(self, network: nn.Module) -> set[str]:
        found = self.technique._candidates(network, self.technique._read_elsewhere(network), self.prefix)
        if self.technique._indivisible(_inputs(found)):  # transform will raise the error
            return set()
        return {f"{name}.weight" for name, _ in found}.union(self.technique._stacks(network, self.prefix))

    def replaced(self, layer: Any, key: str) -> nn.Module:
        weight = getattr(layer, key)
        quantized: nn.Module
        if key == "weight":
            quantized = self.technique._quantized(layer)
        else:
            quantized = self.technique._quantized_stack(layer, key)
        self.technique._early.append((quantized, weight.nbytes, weight.numel()))
        return quantized


def _inputs(found: list[tuple[str, Any]]) -> dict[str, int]:
    """Return the numbers of inputs of layers, by name."""
    return {name: part.weight.shape[-2 if _is_transposed(part) else -1] for name, part in found}


def _is_transposed(part: nn.Module) -> bool:
    if isinstance(part, ExpertLinear):
        return part.is_transposed
    return is_conv1d(part)


def _is_linear(part: nn.Module) -> bool:
    return acts_as_linear(part) or type(part) is ExpertLinear or is_conv1d(part)

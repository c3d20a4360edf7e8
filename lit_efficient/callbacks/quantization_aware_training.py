"""Quantisation-aware training: train with the roundings that int4 weights and int8 activations will have.

    y = r8(x) r4(W)^T,    r4: 16 levels in each group of g inputs of a row;    r8: 256 levels in each token
    gradients pass the roundings as if they were not there;    export: W -> codes, scales

Saves: the quality that rounding after training costs; the export holds weights of 4 bits, a byte each as torchao does
Costs: both roundings in each forward pass, and a rounded copy of the weights for the backward pass
Source: Jacob et al. (2018), https://arxiv.org/abs/1712.05877; torchao's Int8DynActInt4WeightQATQuantizer
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_installed, check_number, refusal
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.models.probes.read_weights import Watched
from lit_efficient.surgery import call_layers, mix_in, mix_out, mix_under, name_pattern, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def imitate_int4(linear: nn.Linear, group_size: int) -> None:
    """Let a linear layer round its weight to int4 and its input to int8 in each forward pass, in place.

    Args:
        linear: An ``nn.Linear`` of floats; its parameters stay, and get the gradients of the rounded ones.
        group_size: Inputs of a row that share a scale; a divisor of their number.
    """
    mix_under(linear, _Imitates, qat_group=group_size)


def load_int4(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put torchao's int4 layers in the place of those that ``state`` has codes of, and load all of it.

    Args:
        module: The float module, or the trained one.
        state: What an export in the format ``safetensors`` holds, as ``safetensors.torch.load_file`` reads it.
    """
    silence_imports()
    from lit_efficient.internals.torchao_qat import int4_layer

    for name in [key.removesuffix(".scales") for key in state if key.endswith(".scales")]:
        owner, _, last = name.rpartition(".")
        old: Any = module.get_submodule(name)
        entries = {key: state[f"{name}.{key}"] for key in ("weight", "scales", "zeros")}
        layer = int4_layer(entries, old.bias, old.weight.dtype).train(old.training)
        setattr(module.get_submodule(owner), last, layer)
    call_layers(module)
    module.load_state_dict(state)


class _Imitates(nn.Module):
    """Mix-in of a linear layer."""

    weight: Tensor
    bias: Tensor | None
    qat_group: int

    def forward(self, x: Tensor) -> Tensor:
        from lit_efficient.internals.torchao_qat import rounded_activations, rounded_weight

        return F.linear(rounded_activations(x), rounded_weight(self.weight, self.qat_group), self.bias)


class _Reads(Watched):
    """Mix-in of a layer while the first batch is trained: that the loss depends on the weight as it is, is an error."""

    qat_name: str

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name != "weight" or not torch.is_grad_enabled() or not parameter.requires_grad:
            return parameter
        read = parameter.view_as(parameter)  # who reads its type or shape gets no gradient
        read.register_hook(self._refuse)
        return read

    def _refuse(self, gradient: Tensor) -> None:
        raise ConfigurationError(
            f"QuantizationAwareTraining: the network reads the weight of {self.qat_name!r} and does not call the "
            "layer, as fused kernels do: it would train unrounded, and be exported as codes. Name it in skip"
        )


class QuantizationAwareTraining(CheckpointHooks, Technique):
    """Train linear layers so that they lose little as int4 weights with int8 activations, which the export holds.

    Training, validation and sampling compute with the rounded weights; checkpoints hold the unrounded ones under
    their names. ``export --format safetensors`` writes the codes in torchao's layout, for :func:`load_int4`; what
    was validated is what it computes. Other formats, which hold floats, are refused.

    Args:
        group_size: Inputs of a row that share a scale. Layers whose inputs it does not divide stay as they are.
        skip: Regular expressions for the ends of dotted names of layers that stay; none need match.

    Raises:
        ConfigurationError: For an argument out of range, without layers to round, for a model whose weights are
            quantised already, and for layers whose weight the network reads by itself, in the first step.
    """

    phase = Phase.QUANTIZE
    alters = ("weights",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "QuantizeBase": "it rounds weights for good, which then do not train: use one of the two",
        "Float8Precision": "it multiplies in float8 what is to be rounded to int4: use one of the two",
        Trait.ADAPTER: (
            "it freezes the weights, which then are not trained for rounding, and would be merged into weights that "
            "were rounded without it: use QuantizeBase with it, or leave it out"
        ),
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "int4 weights that were trained as such")}

    def __init__(self, group_size: int = 32, skip: tuple[str, ...] = ()) -> None:
        super().__init__()
        check_number("QuantizationAwareTraining", "group_size", group_size, least=2, whole=True)
        if isinstance(skip, str):
            raise refusal("QuantizationAwareTraining", "skip", "a list of patterns", skip)
        for pattern in skip:
            name_pattern(pattern, "QuantizationAwareTraining: skip")
        check_installed("QuantizationAwareTraining", "torchao")
        self.group_size = group_size
        self.skip = tuple(skip)
        self._looked = False  # whether the network uses a weight by itself

    def transform(self, module: nn.Module) -> Report:
        silence_imports()
        if done := [name for name, part in module.named_modules() if is_quantized(part)]:
            raise ConfigurationError(
                f"QuantizationAwareTraining: {len(done)} layers of {type(module).__name__} are quantised already, "
                f"first {done[0]!r}: load the float weights"
            )
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        linears: dict[str, Any] = {n: part for n, part in module.named_modules() if n and unmixed(part) is nn.Linear}
        skips = [name_pattern(pattern, "QuantizationAwareTraining: skip") for pattern in self.skip]
        found = {
            name: part
            for name, part in linears.items()
            if part.in_features % self.group_size == 0 and uses[id(part.weight)] == 1  # one that is tied stays whole
            and not any(pattern.fullmatch(name) for pattern in skips)
        }  # fmt: skip
        if not found:
            inputs = sorted({part.in_features for part in linears.values()})
            raise ConfigurationError(
                f"QuantizationAwareTraining: {type(module).__name__} has no linear layer whose inputs group_size="
                f"{self.group_size} divides and that skip={self.skip} leaves; their inputs are {inputs}"
            )
        for part in found.values():
            imitate_int4(part, self.group_size)
        call_layers(module)
        weights = sum(part.weight.numel() for part in found.values())
        left = [name for name in linears if name not in found]
        stays = f"; {', '.join(left[:6])}{', ...' if len(left) > 6 else ''} stay as they are" if left else ""
        return Report(
            f"{len(found)} of {len(linears)} linear layers train as int4 in groups of {self.group_size}, with int8 "
            f"inputs{stays}",
            modules=tuple(found),
            parameters=weights,
            details={"left": len(left)},
        )

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self._looked:
            for name, part in pl_module.named_modules():
                if isinstance(part, _Imitates):
                    mix_in(part, _Reads, qat_name=name)

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        if not self._looked:
            self._looked = True
            for part in pl_module.modules():
                mix_out(part, _Reads)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_after_backward(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        parts = module.named_modules()
        groups = {name: part.qat_group for name, part in parts if isinstance(part, _Imitates)}
        checkpoint["lit_efficient"]["int4_groups"] = groups

    @classmethod
    def convert_export(cls, state: dict[str, Tensor], checkpoint: Mapping[str, Any], module: Any = None) -> None:
        silence_imports()
        from lit_efficient.internals.torchao_qat import int4_entries

        for name, group in checkpoint["lit_efficient"]["int4_groups"].items():
            if f"{name}.weight" in state:
                entries = int4_entries(state[f"{name}.weight"].detach(), group)
                state |= {f"{name}.{key}": tensor for key, tensor in entries.items()}
        if module is not None:
            load_int4(module, state)

"""Quantisation-aware training: round weights to int4 and activations to int8 while training.

    y = r8(x) r4(W)^T,    r4: 16 levels in each group of g inputs of a row;    r8: 256 levels in each token
    gradients ignore the rounding (straight-through estimator);    export: W -> codes, scales

Saves: the quality that is lost if weights are rounded only after training. The export holds 4-bit weights, one in each
    byte, as torchao stores them
Costs: both roundings in each forward pass, and a rounded copy of the weights for the backward pass
Source: Jacob et al. (2018), https://arxiv.org/abs/1712.05877; torchao's Int8DynActInt4WeightQATQuantizer
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_installed, check_number, listed
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.models.probes.read_weights import Watched
from lit_efficient.surgery import call_layers, mix_in, mix_out, mix_under, name_pattern, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def imitate_int4(linear: nn.Linear, group_size: int) -> None:
    """Change a linear layer in place, so that it rounds its weight to int4 and its input to int8 in the forward pass.

    Args:
        linear: An ``nn.Linear`` of floats. Its parameters stay, and get the gradients of the rounded ones.
        group_size: Number of inputs of a row that share a scale; a divisor of the number of inputs.
    """
    mix_under(linear, _RoundedLinear, qat_group=group_size)


def load_int4(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the layers that have int4 codes in ``state`` by torchao's int4 layers, and load ``state``.

    Args:
        module: A module with float weights, trained or not.
        state: Tensors of an export in the format ``safetensors``, as ``safetensors.torch.load_file`` reads them.
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


class _RoundedLinear(nn.Module):
    """Mix-in of a linear layer that rounds its weight to int4 and its input to int8."""

    weight: Tensor
    bias: Tensor | None
    qat_group: int  # number of inputs of a row that share a scale

    def forward(self, x: Tensor) -> Tensor:
        from lit_efficient.internals.torchao_qat import rounded_activations, rounded_weight

        return F.linear(rounded_activations(x), rounded_weight(self.weight, self.qat_group), self.bias)


class _WatchesWeight(Watched):
    """Mix-in of a layer in the first step that raises an error if the loss depends on the unrounded weight."""

    qat_name: str  # name of the layer, for messages

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name != "weight" or not torch.is_grad_enabled() or not parameter.requires_grad:
            return parameter
        # The hook runs only if a gradient arrives: code that reads only the type or shape is no error.
        read = parameter.view_as(parameter)
        read.register_hook(self._refuse)
        return read

    def _refuse(self, gradient: Tensor) -> None:
        raise ConfigurationError(
            f"QuantizationAwareTraining: the network reads the weight of {self.qat_name!r} and does not call the "
            "layer, as fused kernels do. The weight would be trained without rounding but exported as codes. Name the "
            "layer in skip"
        )


class QuantizationAwareTraining(CheckpointHooks, Technique):
    """Train linear layers with int4 weights and int8 activations, which the export also uses.

    Training, validation and sampling compute with the rounded weights. Checkpoints hold the unrounded weights under the
    same names. ``export --format safetensors`` writes the codes in torchao's layout, for :func:`load_int4`; the
    exported network computes what was validated. Other formats hold floats and are refused.

    Args:
        group_size: Number of inputs of a row that share a scale, at least 2. Layers whose number of inputs it does not
            divide are not changed.
        skip: Regular expressions for the ends of dotted names of layers that are not changed. A pattern need not match.

    Raises:
        ConfigurationError: For an argument out of range, if there are no layers to round, and for a model whose weights
            are already quantised. In the first step, if the network reads the weight of a layer without calling it.
    """

    phase = Phase.QUANTIZE
    alters = ("weights",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "QuantizeBase": "it stores rounded weights, which do not train; use one of the two",
        "Float8Precision": "it multiplies in float8, but the products are to be rounded to int4; use one of the two",
        Trait.ADAPTER: (
            "it freezes the weights, which then are not trained for rounding, and would be merged into weights that "
            "were rounded without it; use QuantizeBase with it, or leave it out"
        ),
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "int4 weights that are trained with their rounding")}

    def __init__(self, group_size: int = 32, skip: tuple[str, ...] = ()) -> None:
        super().__init__()
        check_number("QuantizationAwareTraining", "group_size", group_size, least=2, whole=True)
        for pattern in skip:
            name_pattern(pattern, "QuantizationAwareTraining: skip")
        check_installed("QuantizationAwareTraining", "torchao")
        self.group_size = group_size
        self.skip = tuple(skip)
        self._first_step_checked = False  # whether the network reads no weight without calling its layer

    def transform(self, module: nn.Module) -> Report:
        silence_imports()
        done = [name for name, part in module.named_modules() if is_quantized(part)]
        if done:
            raise ConfigurationError(
                f"QuantizationAwareTraining: {len(done)} layers of {type(module).__name__} are already quantised, "
                f"first {done[0]!r}. Load the float weights"
            )
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        linears: dict[str, Any] = {n: part for n, part in module.named_modules() if n and unmixed(part) is nn.Linear}
        skips = [name_pattern(pattern, "QuantizationAwareTraining: skip") for pattern in self.skip]
        found: dict[str, Any] = {}
        for name, part in linears.items():
            fits = part.in_features % self.group_size == 0
            # A tied weight is also used without rounding, for example by an embedding.
            tied = uses[id(part.weight)] > 1
            if fits and not tied and not any(pattern.fullmatch(name) for pattern in skips):
                found[name] = part
        if not found:
            inputs = sorted({part.in_features for part in linears.values()})
            raise ConfigurationError(
                f"QuantizationAwareTraining: {type(module).__name__} has no linear layer whose inputs group_size="
                f"{self.group_size} divides and that skip={self.skip} does not match. Its layers have {inputs} inputs"
            )
        for part in found.values():
            imitate_int4(part, self.group_size)
        call_layers(module)
        weights = sum(part.weight.numel() for part in found.values())
        left = [name for name in linears if name not in found]
        number = f"{len(found)} of {len(linears)} linear layers"
        summary = f"{number} train as int4 in groups of {self.group_size}, with int8 inputs"
        if left:
            summary += f"; not changed: {listed(left, 6)}"
        return Report(
            summary,
            modules=tuple(found),
            parameters=weights,
            details={"left": len(left)},
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: object, batch_idx: int) -> None:
        if not self._first_step_checked:
            for name, part in pl_module.named_modules():
                if isinstance(part, _RoundedLinear):
                    mix_in(part, _WatchesWeight, qat_name=name)

    def on_after_backward(self, trainer: Trainer, pl_module: nn.Module) -> None:
        if not self._first_step_checked:
            self._first_step_checked = True
            for part in pl_module.modules():
                mix_out(part, _WatchesWeight)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_after_backward(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        parts = module.named_modules()
        groups = {name: part.qat_group for name, part in parts if isinstance(part, _RoundedLinear)}
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

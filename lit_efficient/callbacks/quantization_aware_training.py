"""Quantisation-aware training: round weights and activations to 4 or 8 bits while training.

    int4         y = r8(x) r4(W)^T,  r4: 16 levels in each group of g inputs of a row;  r8: 256 levels in each token
    mxfp4, mxfp8 y = r(x) r(W)^T,    r: floats of 4 or 8 bits times a power of two for each 32 inputs of a row
    nvfp4        y = r(x) r(W)^T,    r: floats of 4 bits times a float8 for each 16 inputs, times one float32

Gradients ignore the rounding (straight-through estimator). The export holds codes and scales.

Saves: the quality that is lost if weights are rounded only after training. The export holds the codes as torchao stores
    them: int4 one in each byte, floats of 4 bits two in each byte
Costs: both roundings in each forward pass, and a rounded copy of the weights for the backward pass
Source: Jacob et al. (2018), https://arxiv.org/abs/1712.05877; MX: Rouhani et al. (2023),
    https://arxiv.org/abs/2310.10537; torchao's Int8DynActInt4WeightQATQuantizer and prototype.qat
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_installed, check_number, listed, refusal
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.models.probes.read_weights import Watched
from lit_efficient.surgery import call_layers, in_autocast_dtype, mix_in, mix_out, mix_under, name_pattern, unmixed
from lit_efficient.technique import Technique

_BLOCKS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # inputs of a row that share a scale


def imitate_int4(linear: nn.Linear, group_size: int) -> None:
    """Change a linear layer in place, so that it rounds its weight to int4 and its input to int8 in the forward pass.

    Args:
        linear: An ``nn.Linear`` of floats. Its parameters stay, and get the gradients of the rounded ones.
        group_size: Number of inputs of a row that share a scale; a divisor of the number of inputs.
    """
    mix_under(linear, _RoundedLinear, qat_group=group_size)


def imitate_blocks(linear: nn.Linear, format: str) -> None:
    """Change a linear layer in place, so that it rounds its weight and its input to a format with scales of blocks.

    Args:
        linear: An ``nn.Linear`` of floats. Its parameters stay, and get the gradients of the rounded ones.
        format: ``mxfp4`` or ``mxfp8``, for inputs in multiples of 32; ``nvfp4``, for inputs in multiples of 16.
    """
    mix_under(linear, _RoundedLinear, qat_group=_BLOCKS[format], qat_format=format)


def load_codes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the layers that have codes in ``state`` by layers with torchao's weights, and load ``state``.

    Layers in MXFP4, MXFP8 and NVFP4 compute with the rounded values in float, on any device.

    Args:
        module: A module with float weights, trained or not.
        state: Tensors of an export in the format ``safetensors``, as ``safetensors.torch.load_file`` reads them.
    """
    silence_imports()
    from lit_efficient.internals.torchao_mx import block_layer
    from lit_efficient.internals.torchao_qat import int4_layer

    rest = dict(state)
    loaded = []
    for name in [key.removesuffix(".scales") for key in state if key.endswith(".scales")]:
        owner, _, last = name.rpartition(".")
        old: Any = module.get_submodule(name)
        keys = [key for key in ("weight", "scales", "zeros", "tensor_scale") if f"{name}.{key}" in state]
        entries = {key: state[f"{name}.{key}"] for key in keys}
        if "zeros" in entries:
            layer = int4_layer(entries, old.bias, old.weight.dtype)
        else:
            layer = block_layer(entries, old.bias, old.weight.dtype)
            loaded.append(f"{name}.weight")
            rest = {key: tensor for key, tensor in rest.items() if key not in {f"{name}.{part}" for part in keys}}
        setattr(module.get_submodule(owner), last, layer.train(old.training))
    call_layers(module)
    missing, unexpected = module.load_state_dict(rest, strict=False)
    absent = sorted(set(missing) - set(loaded))
    if absent or unexpected:
        raise ConfigurationError(f"load_codes: missing tensors {absent}, unexpected tensors {unexpected}")


class _RoundedLinear(nn.Module):
    """Mix-in of a linear layer that rounds its weight and its input."""

    weight: Tensor
    bias: Tensor | None
    qat_group: int  # number of inputs of a row that share a scale
    qat_format: str = "int4"
    # An adapter in front of this mix-in passes its sum with the weight: the exported codes are those of the sum.
    rounds_sum = True

    def forward(self, x: Tensor) -> Tensor:
        if self.qat_format != "int4":
            from lit_efficient.internals.torchao_mx import rounded_blocks

            x = in_autocast_dtype(x)  # kernels of these formats take it in 16 bits
            weight = rounded_blocks(self.weight, self.qat_format)
            return F.linear(rounded_blocks(x, self.qat_format), weight, self.bias)
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
    """Train linear layers with rounded weights and activations, which the export also uses.

    Training, validation and sampling compute with the rounded weights. Checkpoints hold the unrounded weights under the
    same names. ``export --format safetensors`` writes the codes in torchao's layout, for :func:`load_codes`; the
    exported network computes what was validated. Other formats hold floats and are refused. With LoRA (variant lora or
    rslora, without dropout) only the adapters train, and the sum of weight and adapter is rounded, as in L4Q
    (https://arxiv.org/abs/2402.04902). The sum takes the memory of the weight in each forward pass. For a base that is
    stored in 4 bits use QuantizeBase with ``LoRA(variant="rounded")``.

    Args:
        format: ``int4``, with int8 activations; ``mxfp4``, ``mxfp8`` or ``nvfp4``, for weights and activations. NVFP4
            has one scale for all activations of a batch.
        group_size: Number of inputs of a row that share a scale of int4, at least 2; None is 32. The other formats have
            32 (MX) and 16 (NVFP4). Layers whose number of inputs it does not divide are not changed; for NVFP4 nor
            those whose number of outputs 16 does not divide.
        skip: Regular expressions for the ends of dotted names of layers that are not changed. A pattern need not match.

    Raises:
        ConfigurationError: For an argument out of range, if there are no layers to round, and for a model whose weights
            are already quantised. In the first step, if the network reads the weight of a layer without calling it.
    """

    phase = Phase.QUANTIZE
    alters = ("weights",)
    conflicts: ClassVar[dict[str, str]] = {
        "QuantizeBase": "it stores rounded weights, which do not train; use one of the two",
        "Float8Precision": "it multiplies in float8, but the products are to be rounded otherwise; use one of the two",
        "IA3": "it freezes the weights, so they are not trained for rounding: use LoRA",
        "PeftAdapter": "it freezes the weights, so they are not trained for rounding: use LoRA",
        "PrefixTuning": "it freezes the weights, so they are not trained for rounding: use LoRA",
        "PromptTuning": "it freezes the weights, so they are not trained for rounding: use LoRA",
        "LoRA(variant='dora')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='pissa')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='olora')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='corda')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='lora_ga')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='eva')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='loftq')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='lora_fa')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='alora')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='qalora')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
        "LoRA(variant='rounded')": "only plain adapters are rounded: use lora or rslora, or QuantizeBase",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "4-bit weights that are trained with their rounding")}

    def __init__(
        self,
        group_size: int | None = None,
        skip: tuple[str, ...] = (),
        format: Literal["int4", "mxfp4", "mxfp8", "nvfp4"] = "int4",
    ) -> None:
        super().__init__()
        check_number("QuantizationAwareTraining", "group_size", group_size, least=2, whole=True, null=True)
        check_choice("QuantizationAwareTraining", "format", format, ("int4", *_BLOCKS))
        if format != "int4" and group_size is not None:
            raise refusal("QuantizationAwareTraining", "group_size", f"null for format={format!r}", group_size)
        for pattern in skip:
            name_pattern(pattern, "QuantizationAwareTraining: skip")
        check_installed("QuantizationAwareTraining", "torchao")
        self.group_size = group_size
        self.skip = tuple(skip)
        self.format = format
        self._group = _BLOCKS.get(format, group_size or 32)
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
            fits = part.in_features % self._group == 0
            if self.format == "nvfp4":
                fits = fits and part.out_features % self._group == 0
            # A tied weight is also used without rounding, for example by an embedding.
            tied = uses[id(part.weight)] > 1
            if fits and not tied and not any(pattern.fullmatch(name) for pattern in skips):
                found[name] = part
        if not found:
            inputs = sorted({part.in_features for part in linears.values()})
            raise ConfigurationError(
                f"QuantizationAwareTraining: {type(module).__name__} has no linear layer whose inputs group_size="
                f"{self._group} divides and that skip={self.skip} does not match. Its layers have {inputs} inputs"
            )
        for part in found.values():
            if self.format == "int4":
                imitate_int4(part, self._group)
            else:
                imitate_blocks(part, self.format)
        call_layers(module)
        weights = sum(part.weight.numel() for part in found.values())
        left = [name for name in linears if name not in found]
        number = f"{len(found)} of {len(linears)} linear layers"
        summary = f"{number} train as {self.format} in blocks of {self._group}, with inputs in this format"
        if self.format == "int4":
            summary = f"{number} train as int4 in groups of {self._group}, with int8 inputs"
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
        rounded = {name: part for name, part in module.named_modules() if isinstance(part, _RoundedLinear)}
        checkpoint["lit_efficient"]["qat_layers"] = {
            name: (part.qat_format, part.qat_group) for name, part in rounded.items()
        }

    @classmethod
    def convert_export(cls, state: dict[str, Tensor], checkpoint: Mapping[str, Any], module: Any = None) -> None:
        silence_imports()
        from lit_efficient.internals.torchao_mx import block_entries
        from lit_efficient.internals.torchao_qat import int4_entries

        for name, (format, group) in checkpoint["lit_efficient"]["qat_layers"].items():
            weight = state.get(f"{name}.weight")
            if weight is None:
                continue
            if format == "int4":
                entries = int4_entries(weight.detach(), group)
            else:
                entries = block_entries(weight.detach(), format)
            state |= {f"{name}.{key}": tensor for key, tensor in entries.items()}
        if module is not None:
            load_codes(module, state)

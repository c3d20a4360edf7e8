"""Transformers' reading of weights with a hand in it: a layer is replaced as soon as its own weight is read.

What transformers' quantisers are made of: with an ``HfQuantizer`` it reads weights one at a time, under all its
renamings, and a ``ConversionOps`` gets each before the network does. Checked with transformers 5.15 and 5.23.
"""

import functools
from typing import Any, Protocol

import torch
from torch import nn

from lit_efficient.internals.heap import give_back
from lit_efficient.internals.hugging_face import from_config

_METHOD = "lit_efficient"


class Replacing(Protocol):
    """What is to be done with layers while a network is read."""

    bytes_per_weight: float  # afterwards, about

    def chosen(self, network: nn.Module) -> set[str]:
        """Names of the linear layers to be replaced, of a network on the meta device."""

    def replaced(self, layer: nn.Module) -> nn.Module:
        """What a layer that has its weight becomes."""


def empty_from_config(kind: Any, config: Any, **options: Any) -> Any:
    """A model whose weights are tied and not drawn, nor in memory: ``transformers.initialization.no_init_weights``."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = from_config(kind, config, **options)
    model.tie_weights()
    return model


def replacing_config(replacing: Replacing) -> Any:
    """The ``quantization_config`` for ``from_pretrained`` under which ``replacing`` acts; the network keeps no mark."""
    return _kind()(replacing)


@functools.cache
def _kind() -> Any:
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Config(QuantizationConfigMixin):
        def __init__(self, replacing: Replacing) -> None:
            self.quant_method = _METHOD  # type: ignore[assignment]
            self.replacing = replacing

        def __deepcopy__(self, memo: dict[int, Any]) -> "Config":
            return self

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": _METHOD}

    class Replace(ConversionOps):
        def __init__(self, quantizer: Any) -> None:
            self.quantizer = quantizer

        @torch.no_grad()
        def convert(self, input_dict: dict[str, Any], *_: Any, **given: Any) -> Any:
            model, left = given["model"], dict[str, Any]()
            for name in list(input_dict):
                value: Any = input_dict.pop(name)
                if not self.quantizer.param_needs_quantization(model, name):
                    left[name] = value
                    continue
                owner, __, last = name.removesuffix(".weight").rpartition(".")
                layer = model.get_submodule(owner).get_submodule(last)
                layer.weight = nn.Parameter(value[0] if isinstance(value, list) else value, requires_grad=False)
                del value
                twin = self.quantizer.replacing.replaced(layer)
                for parameter in twin.parameters():
                    parameter._is_hf_initialized = True
                setattr(model.get_submodule(owner), last, twin)
                del layer
                give_back()
                given["missing_keys"].discard(name)
            return left

    @register_quantizer(_METHOD)
    class Quantizer(HfQuantizer):
        is_trainable = True
        quantized_element_size = 4.0  # of an instance what `replacing` says

        def __init__(self, config: Config, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.replacing = config.replacing
            self.quantized_element_size = config.replacing.bytes_per_weight
            self.layers: set[str] = set()

        def is_serializable(self) -> bool:
            return False

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.layers

        def get_quantize_ops(self) -> Replace:
            return Replace(self)

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            self.layers = self.replacing.chosen(model) - {
                name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair
            }

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            self.remove_quantization_config(model)
            vars(model).pop("is_quantized", None)
            for part in model.modules():
                vars(getattr(part, "config", part)).pop("_is_quantized", None)
            return model

    return Config

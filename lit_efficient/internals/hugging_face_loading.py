"""Replacement of layers while transformers loads weights: a layer is replaced as soon as its weight has been read.

It uses the interface of quantisers in transformers: an ``HfQuantizer`` makes transformers read weights one at a time,
with all renamings, and a ``ConversionOps`` receives each weight before the network does. Checked with transformers 5.15
and 5.23.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lit_efficient.internals.heap import give_back
from lit_efficient.internals.hugging_face import from_config

_METHOD = "lit_efficient"


class Replacing(Protocol):
    """Choice of layers, and their replacements."""

    bytes_per_weight: float  # approximate size of a weight after the replacement

    def chosen(self, network: nn.Module) -> set[str]:
        """Return the names of the weights to replace: ``weight`` of linear layers, and stacked parameters of modules.

        The network is on the meta device.
        """

    def replaced(self, layer: nn.Module, key: str) -> nn.Module:
        """Return the replacement of a layer, or of the parameter ``key``, which has been loaded."""


def empty_from_config(kind: Any, config: Any, **options: Any) -> Any:
    """Build a model with tied weights, without initialising them: ``transformers.initialization.no_init_weights``."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = from_config(kind, config, **options)
    model.tie_weights()
    return model


def replacing_config(replacing: Replacing, mxfp4: Sequence[str] = ()) -> object:
    """Return a ``quantization_config`` for ``from_pretrained`` that replaces layers. The network does not keep it.

    Args:
        replacing: The layers and their replacements.
        mxfp4: Last names of parameters that the files hold in MXFP4, as ``NAME_blocks`` and ``NAME_scales``. Each is
            dequantised when it is read. The ``config`` for ``from_pretrained`` must not have a ``quantization_config``.
    """
    return _kind()(replacing, mxfp4)


@functools.cache
def _kind() -> Any:
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.integrations.mxfp4 import Mxfp4Dequantize
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Config(QuantizationConfigMixin):
        def __init__(self, replacing: Replacing, mxfp4: Sequence[str]) -> None:
            self.quant_method = _METHOD  # type: ignore[assignment]
            self.replacing = replacing
            self.mxfp4 = mxfp4

        def __deepcopy__(self, memo: dict[int, object]) -> "Config":
            return self

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": _METHOD}

    class Replace(ConversionOps):
        def __init__(self, quantizer: Any) -> None:
            self.quantizer = quantizer

        @torch.no_grad()
        def convert(self, input_dict: dict[str, Any], *_: Any, **given: Any) -> Any:
            model = given["model"]
            left: dict[str, Any] = {}
            for name in list(input_dict):
                value: Any = input_dict.pop(name)
                if not self.quantizer.param_needs_quantization(model, name):
                    left[name] = value
                    continue
                owner, __, key = name.rpartition(".")
                layer = model.get_submodule(owner)
                setattr(layer, key, nn.Parameter(value[0] if isinstance(value, list) else value, requires_grad=False))
                del value
                twin = self.quantizer.replacing.replaced(layer, key)
                twin._is_hf_initialized = True  # or transformers would initialise it randomly
                for parameter in twin.parameters():
                    parameter._is_hf_initialized = True
                if key == "weight":
                    owner, __, last = owner.rpartition(".")
                    setattr(model.get_submodule(owner), last, twin)
                del layer  # so that the memory of the original weight can be returned
                give_back()
                given["missing_keys"].discard(name)
            return left

    @register_quantizer(_METHOD)
    class Quantizer(HfQuantizer):
        is_trainable = True
        quantized_element_size = 4.0  # overwritten in `__init__`

        def __init__(self, config: Config, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.replacing = config.replacing
            self.mxfp4 = config.mxfp4
            self.quantized_element_size = config.replacing.bytes_per_weight
            self.weights: set[str] = set()

        def is_serializable(self) -> bool:
            return False

        def param_needs_quantization(self, model: nn.Module, param_name: str, **_: object) -> bool:
            return param_name in self.weights

        def get_quantize_ops(self) -> Replace:
            return Replace(self)

        def get_weight_conversions(self) -> list[Any]:
            # transformers casts the codes of 8 bits to the model's dtype, in which they are exact.
            pairs = {name: [f"{name}_blocks", f"{name}_scales"] for name in self.mxfp4}
            return [WeightConverter(sources, name, [Mxfp4Dequantize(None)]) for name, sources in pairs.items()]

        def _process_model_before_weight_loading(self, model: Any, **_: object) -> None:
            self.weights = self.replacing.chosen(model)
            for pair in model.all_tied_weights_keys.items():
                self.weights -= set(pair)

        def _process_model_after_weight_loading(self, model: nn.Module, **_: object) -> object:
            self.remove_quantization_config(model)
            vars(model).pop("is_quantized", None)
            for part in model.modules():
                vars(getattr(part, "config", part)).pop("_is_quantized", None)
            return model

    return Config

"""A peft adapter of a network of diffusers in the two forms that programs for images load.

    pytorch_lora_weights.safetensors    unet.NAME.lora_A.weight, or transformer.NAME...      pipeline.load_lora_weights
    kohya.safetensors                   lora_unet_NAME.lora_down.weight, .lora_up.weight, .alpha   (of a UNet)

Source: the loaders of diffusers; https://github.com/kohya-ss/sd-scripts. Kohya's names of transformers are those of
other code than diffusers', with other layers: of them there is the first form only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.files.tensors import save_tensors

LORA_FILE, KOHYA_FILE = "pytorch_lora_weights.safetensors", "kohya.safetensors"
_PEFT = "base_model.model."
_KOHYA = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight", "lora_magnitude_vector": "dora_scale"}


def diffusers_class(model: nn.Module) -> dict[str, str] | None:
    """What peft's configurations call ``auto_mapping``, for a model of diffusers; None for others."""
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith("diffusers.models."))
    kind = next(kinds, None)
    return None if kind is None else {"base_model_class": kind.__name__, "parent_library": kind.__module__}


def write_diffusers_lora(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write both forms beside a peft adapter's tensors and configuration, if it is of a model of diffusers.

    What is no factor stays there alone: the forms have no place.
    """
    kind = (config.get("auto_mapping") or {}).get("base_model_class")
    if kind is None or config["peft_type"] != "LORA":
        return
    place = "unet" if kind.startswith("UNet") else "transformer"
    own = {name.removeprefix(_PEFT): tensor for name, tensor in tensors.items() if ".lora_" in name}
    header = json.dumps({f"{place}.{key}": value for key, value in config.items()})
    named = {f"{place}.{name}": tensor for name, tensor in own.items()}
    save_tensors(folder / LORA_FILE, named, format="pt", lora_adapter_metadata=header)
    if place == "unet":
        save_tensors(folder / KOHYA_FILE, to_kohya(own, config), format="pt")


def to_kohya(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Kohya's names for factors of a UNet's layers; ``alpha`` divided by the rank is the scale there."""
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config["use_rslora"] else 1.0)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, factor = name.partition(".lora_")
        key = "lora_unet_" + layer.replace(".", "_")
        found[f"{key}.{_KOHYA[f'lora_{factor}']}"] = tensor
        found[f"{key}.alpha"] = torch.tensor(float(alpha))
    return found

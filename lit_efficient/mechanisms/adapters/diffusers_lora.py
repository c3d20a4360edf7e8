"""Export of peft adapters of diffusers networks to the two formats that image programs load.

    pytorch_lora_weights.safetensors    unet.NAME.lora_A.weight, transformer.NAME...,        pipeline.load_lora_weights
                                        text_encoder.NAME..., text_encoder_2.NAME...
    kohya.safetensors                   lora_unet_NAME.lora_down.weight, .lora_up.weight, .alpha   (of a UNet)
                                        lora_te_NAME..., in SDXL lora_te1_NAME..., lora_te2_NAME...

Adapters of denoising transformers are written in the first format only, because kohya's names refer to another
implementation with other layers. Layers of CLIP are named as in published files, below ``text_model``.
Source: the loaders of diffusers; https://github.com/kohya-ss/sd-scripts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import Fields
from lit_efficient.files.tensors import save_tensors
from lit_efficient.mechanisms.adapters.peft_folder import LORA_FILE

KOHYA_FILE = "kohya.safetensors"
_PEFT = "base_model.model."
_KOHYA = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight", "lora_magnitude_vector": "dora_scale"}


def places_of(networks: Sequence[Fields]) -> dict[str, str]:
    """Return the places of networks in a pipeline of diffusers: ``unet`` or ``transformer``, and ``text_encoder``, ...

    Text encoders are found by their names, else by their order, with those of a projection last, as in SDXL.

    Args:
        networks: As of :func:`~lit_efficient.mechanisms.adapters.peft_folder.placement`.

    Returns:
        The places by the names of the networks.

    Raises:
        ConfigurationError: If a pipeline cannot have these networks.
    """
    denoisers = [part for part in networks if part["library"] == "diffusers"]
    if len(denoisers) != 1:
        raise ConfigurationError(
            "export: pipelines of diffusers load adapters of one denoiser and its text encoders, but the checkpoint "
            f"has adapters in {', '.join(part['class'] for part in networks)}: use format safetensors"
        )
    places = {}
    for part in denoisers:
        places[part["name"]] = "unet" if part["class"].startswith("UNet") else "transformer"
    encoders = [part for part in networks if part["library"] != "diffusers"]
    lasts = [part["name"].rpartition(".")[2] for part in encoders]
    if not all(re.fullmatch(r"text_encoder(_[2-9])?", last) for last in lasts) or len({*lasts}) < len(lasts):
        encoders.sort(key=lambda part: part["class"].endswith("WithProjection"))
        lasts = ["text_encoder", *(f"text_encoder_{number}" for number in range(2, len(encoders) + 1))]
    return places | {part["name"]: last for part, last in zip(encoders, lasts)}


def write_several(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object], networks: Sequence[Fields]
) -> None:
    """Write the factors of several networks for ``load_lora_weights`` to a folder.

    Args:
        folder: The folder.
        tensors: Tensors of peft's file by name.
        config: Configuration of peft.
        networks: As in :func:`places_of`.
    """
    named: dict[str, Tensor] = {}
    kohya: dict[str, Tensor] = {}
    header: dict[str, object] = {}
    places = places_of(networks)
    for part in networks:
        place = places[part["name"]]
        prefix = f"{_PEFT}{part['name']}."
        own = {}
        for name, tensor in tensors.items():
            if name.startswith(prefix) and ".lora_" in name:
                own[_published(name.removeprefix(prefix), part)] = tensor
        for name, tensor in own.items():
            key = f"{place}.{name}"
            if part["library"] == "transformers" and name.endswith("lora_magnitude_vector"):
                key += ".weight"  # transformers reads peft's present name
            named[key] = tensor
        kohya |= to_kohya(own, config, _kohya_prefix(place, networks))
        header |= {f"{place}.{key}": value for key, value in {**config, "target_modules": part["targets"]}.items()}
    save_tensors(folder / LORA_FILE, named, format="pt", lora_adapter_metadata=json.dumps(header))
    if "unet" in places.values():
        save_tensors(folder / KOHYA_FILE, kohya, format="pt")


def _published(name: str, part: Fields) -> str:
    """Return the name of a tensor in published files. Layers of CLIP are below ``text_model`` in these."""
    if part["class"].startswith("CLIPText") and not name.startswith("text_model."):
        return f"text_model.{name}"
    return name


def _kohya_prefix(place: str, networks: Sequence[Fields]) -> str:
    """Return what kohya's scripts write before the names of layers of a network."""
    if place == "unet":
        return "lora_unet_"
    unets = [json.loads(part["config"]) for part in networks if part["class"].startswith("UNet")]
    number = place.rpartition("_")[2]
    if number.isdigit():
        return f"lora_te{number}_"
    if any(config.get("addition_embed_type") == "text_time" for config in unets):
        return "lora_te1_"
    return "lora_te_"


def write_diffusers_lora(folder: Path, tensors: Mapping[str, Tensor], config: Fields) -> None:
    """Write the factors of a peft adapter in both formats to a folder, if it belongs to a diffusers model.

    The formats contain only factors. Other trained tensors are in peft's own file only.

    Args:
        folder: The folder, which also contains peft's files.
        tensors: Tensors of peft's file by name.
        config: Configuration of peft.
    """
    kind = (config.get("auto_mapping") or {}).get("base_model_class")
    if kind is None or config["peft_type"] != "LORA":
        return
    place = "transformer"
    if kind.startswith("UNet"):
        place = "unet"
    own = {name.removeprefix(_PEFT): tensor for name, tensor in tensors.items() if ".lora_" in name}
    header = json.dumps({f"{place}.{key}": value for key, value in config.items()})
    named = {f"{place}.{name}": tensor for name, tensor in own.items()}
    save_tensors(folder / LORA_FILE, named, format="pt", lora_adapter_metadata=header)
    if place == "unet":
        save_tensors(folder / KOHYA_FILE, to_kohya(own, config), format="pt")


def to_kohya(tensors: Mapping[str, Tensor], config: Fields, prefix: str = "lora_unet_") -> dict[str, Tensor]:
    """Return the factors of a network's layers by kohya's names, with an ``alpha`` for each layer.

    Args:
        tensors: Factors by peft's names, without its prefix.
        config: Configuration of peft.
        prefix: What kohya's scripts write before the name of a layer.
    """
    alpha = config["lora_alpha"]
    if config["use_rslora"]:
        alpha *= config["r"] ** 0.5  # kohya's scale is alpha / r, that of rsLoRA alpha / sqrt(r)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, factor = name.partition(".lora_")
        key = prefix + layer.replace(".", "_")
        found[f"{key}.{_KOHYA[f'lora_{factor}']}"] = tensor
        found[f"{key}.alpha"] = torch.tensor(float(alpha))
    return found

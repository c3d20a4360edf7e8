"""Export of peft adapters of diffusers networks to the two formats that image programs load.

    pytorch_lora_weights.safetensors    unet.NAME.lora_A.weight, transformer.NAME...,        pipeline.load_lora_weights
                                        text_encoder.NAME..., text_encoder_2.NAME...
    kohya.safetensors                   lora_unet_NAME.lora_down.weight, .lora_up.weight, .alpha, .dora_scale
                                        lora_te1_NAME..., lora_te2_NAME...

The second format has the names of the authors for SDXL, SD3 and Flux, as kohya's scripts write them and ComfyUI reads
them, and else those of diffusers. Layers that the authors stack (q, k and v) get the factors of all parts in one A, and
blocks in B. It is written for families whose file a program reads:

    UNets of Stable Diffusion and SDXL    diffusers, ComfyUI, WebUIs
    Flux, Qwen-Image                      diffusers, ComfyUI
    SD3                                   ComfyUI
    Z-Image                               diffusers
Source: the loaders of diffusers; https://github.com/kohya-ss/sd-scripts.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import Fields
from lit_efficient.files.tensors import save_tensors
from lit_efficient.internals.hugging_face import from_config
from lit_efficient.mechanisms.adapters.lora_files import LORA_FILE, places_of
from lit_efficient.mechanisms.adapters.low_rank import scale_of
from lit_efficient.mechanisms.adapters.peft_folder import by_pattern
from lit_efficient.models.libraries.original_names import OriginalLayer, original_layers

KOHYA_FILE = "kohya.safetensors"
_READ = (  # classes for which a program reads the format
    *("UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel"),
    *("QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
)
_PEFT = "base_model.model."
_DOWN = "lora_down.weight"
_UP = "lora_up.weight"
_KOHYA = {"lora_A": _DOWN, "lora_B": _UP, "lora_magnitude_vector": "dora_scale"}


def write_several(folder: Path, tensors: Mapping[str, Tensor], config: Fields, networks: Sequence[Fields]) -> None:
    """Write the factors of several networks for ``load_lora_weights`` to a folder.

    Args:
        folder: The folder.
        tensors: Tensors of peft's file by name.
        config: Configuration of peft.
        networks: As in :func:`places_of`.
    """
    named: dict[str, Tensor] = {}
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
        own_config = {**_relative(config, part), "target_modules": part["targets"]}
        header |= {f"{place}.{key}": value for key, value in own_config.items()}
    save_tensors(folder / LORA_FILE, named, format="pt", lora_adapter_metadata=json.dumps(header))


def _relative(config: Fields, part: Fields) -> dict[str, Any]:
    """Return peft's configuration of several networks with the patterns of one of them."""
    found = dict(config)
    for key in ("rank_pattern", "alpha_pattern"):
        if key in found:
            prefix = f"{part['name']}."
            found[key] = {name.removeprefix("^").removeprefix(prefix): value for name, value in found[key].items()}
    return found


def _published(name: str, part: Fields) -> str:
    """Return the name of a tensor in published files. Layers of CLIP are below ``text_model`` in these."""
    if part["class"].startswith("CLIPText") and not name.startswith("text_model."):
        return f"text_model.{name}"
    return name


def write_diffusers_lora(folder: Path, tensors: Mapping[str, Tensor], config: Fields) -> None:
    """Write the factors of a peft adapter for ``load_lora_weights`` to a folder, if it belongs to a diffusers model.

    The format contains only factors. Other trained tensors are in peft's own file only.

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


def unread_by_programs(networks: Sequence[Fields]) -> str:
    """Return the class of a denoiser for which no program reads kohya's format, or an empty string.

    diffusers' ``load_lora_weights`` loads nothing from such a file, without an error.
    """
    kinds = [part["class"] for part in networks if part["library"] == "diffusers"]
    return next((kind for kind in kinds if kind not in _READ), "")


def write_kohya(folder: Path, tensors: Mapping[str, Tensor], config: Fields, networks: Sequence[Fields]) -> None:
    """Write the factors in kohya's format to a folder, if a program reads it for these networks.

    Args:
        folder: The folder.
        tensors: Tensors of peft's file by name.
        config: Configuration of peft.
        networks: As in :func:`places_of`; one without a name if the tensors have no prefix.
    """
    if unread_by_programs(networks):
        return
    named: dict[str, Tensor] = {}
    for part in networks:
        prefix = _PEFT
        if len(networks) > 1:
            prefix += f"{part['name']}."
        own = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        try:
            factors = {name: one for name, one in own.items() if ".lora_" in name}
            named |= to_kohya(factors, _relative(config, part), part, networks)
        except ConfigurationError as error:
            rank_zero_warn(f"{KOHYA_FILE} is not written: {error}")
            return
    if named:
        save_tensors(folder / KOHYA_FILE, named, format="pt")


def to_kohya(
    tensors: Mapping[str, Tensor], config: Fields, part: Fields, networks: Sequence[Fields] = ()
) -> dict[str, Tensor]:
    """Return the factors of a network's layers by kohya's names, with an ``alpha`` for each layer.

    Args:
        tensors: Factors by peft's names, without its prefix.
        config: Configuration of peft.
        part: Description of the network, as in :func:`places_of`.
        networks: All networks of the adapter.

    Raises:
        ConfigurationError: For DoRA in a part of the layers that the authors stack: the magnitudes of the other parts
            are those of the base, which is not here.
    """
    variant = "rslora" if config["use_rslora"] else "lora"
    scale = scale_of(variant, config["lora_alpha"], config["r"])
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, factor = name.partition(".lora_")
        layers.setdefault(layer, {})[_KOHYA[f"lora_{factor.removesuffix('.weight')}"]] = tensor
    for name, pair in layers.items():
        # Stacked layers share one alpha, and diffusers reads one alpha for a UNet, so that B has the rest of the scale.
        alpha = by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
        pair[_UP] = pair[_UP] * (scale_of(variant, alpha, len(pair[_DOWN])) / scale)
    network = skeleton(part)
    prefix = _kohya_prefix(part, networks or [part])
    found: dict[str, Tensor] = {}
    for original in _kohya_layers(network, part, layers):
        own = [layers.get(name) for name in original.parts]
        rows = [len(network.get_submodule(name).weight) for name in original.parts]
        key = prefix + original.name.replace(".", "_")
        factors = _stacked(own, rows)
        if any(one is not None and "dora_scale" in one for one in own) and any(one is None for one in own):
            raise ConfigurationError(
                f"kohya's format has one layer {original.name} for {', '.join(original.parts)}, and DoRA "
                "adapts only some of them. Name all in targets"
            )
        if original.swapped:
            factors = {name: one if name == _DOWN else torch.cat(one.chunk(2)[::-1]) for name, one in factors.items()}
        rank = len(factors[_DOWN])
        if len(own) == 1:
            factors[_UP] = factors[_UP] * (rank / config["r"])
            rank = config["r"]
        found |= {f"{key}.{name}": one.contiguous() for name, one in factors.items()}
        found[f"{key}.alpha"] = torch.tensor(float(scale * rank))
    return found


def _kohya_layers(network: Any, part: Fields, layers: Collection[str]) -> Iterator[OriginalLayer]:
    """Yield the layers of kohya's format that the adapted layers belong to."""
    originals = []
    if part["class"] != "UNet2DConditionModel" or getattr(network.config, "addition_embed_type", None) == "text_time":
        originals = original_layers(network)
    left = set(layers)
    for original in originals:
        if left & set(original.parts):
            left -= set(original.parts)
            yield original
    for name in layers:
        if name in left:
            yield OriginalLayer(_published(name, part), (name,))


def _kohya_prefix(part: Fields, networks: Sequence[Fields]) -> str:
    place = places_of(networks)[part["name"]]
    if place in ("unet", "transformer"):
        return "lora_unet_"
    denoiser = next(one for one in networks if one["library"] == "diffusers")
    if part["class"].startswith("T5"):
        return "lora_te3_"
    if place == "text_encoder" and denoiser["class"] == "UNet2DConditionModel" and not _has_two(denoiser):
        return "lora_te_"
    return "lora_te2_" if place == "text_encoder_2" else "lora_te1_"


def _has_two(unet: Fields) -> bool:
    """Return whether a UNet's pipeline has two text encoders, as SDXL."""
    return json.loads(unet["config"]).get("addition_embed_type") == "text_time"


def _stacked(parts: Sequence[Mapping[str, Tensor] | None], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the factors of stacked layers: one A, and B in blocks; parts without an adapter have zeros."""
    if len(parts) == 1 and parts[0] is not None:
        own = dict(parts[0])
        if "dora_scale" in own:
            own["dora_scale"] = own["dora_scale"].reshape(-1, *[1] * (own[_DOWN].ndim - 1))
        return own
    ups = []
    downs = []
    magnitudes = []
    for part, count in zip(parts, rows):
        if part is None:
            ups.append(torch.zeros(count, 0))
        else:
            ups.append(part[_UP])
            downs.append(part[_DOWN])
            magnitudes += [part["dora_scale"].reshape(-1, 1)] if "dora_scale" in part else []
    factors = {_DOWN: torch.cat(downs), _UP: torch.block_diag(*ups)}
    if magnitudes:
        factors["dora_scale"] = torch.cat(magnitudes)
    return factors


def skeleton(part: Fields) -> Any:
    """Return a network without memory for its weights."""
    import diffusers
    import transformers

    config = json.loads(part["config"])
    network: Any
    with torch.device("meta"):
        if part["library"] == "diffusers":
            network = getattr(diffusers, part["class"]).from_config(config)
        else:
            kind = getattr(transformers, part["class"])
            network = from_config(kind, kind.config_class(**config))
    return network

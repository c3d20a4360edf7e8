"""LoRA files of image programs for networks of diffusers: diffusers, kohya's scripts, ComfyUI, ai-toolkit and LyCORIS.

    unet.down_blocks.1.attentions.0....to_q.lora_A.weight      diffusers, and ai-toolkit
    lora_unet_input_blocks_4_1_..._to_q.lora_down.weight       kohya, by the names of diffusers or of the authors
    diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight ComfyUI and Black Forest Labs
    double_blocks.0.processor.qkv_lora1.down.weight            XLabs
    lora_te1_text_model_encoder_layers_0_...                   text encoders

The layers of a file are found by the names of the network's own layers. Each layer may have its own rank and ``alpha``.
:class:`~lit_efficient.callbacks.lora.LoRA` has one rank and one scale, so that smaller factors are padded: rows of B A
that are zero at first, and a scale that is part of B. The change of the weight stays the same.

Source: the loaders of diffusers; https://github.com/kohya-ss/sd-scripts; https://github.com/KohakuBlueleaf/LyCORIS.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, listed
from lit_efficient.files.checkpoints import Fields
from lit_efficient.files.tensors import load_tensors, map_tensors
from lit_efficient.models.libraries.original_names import OriginalLayer, original_layers, xlabs_layers
from lit_efficient.surgery import unmixed

LORA_FILE = "pytorch_lora_weights.safetensors"  # name of the file that pipelines of diffusers save and load
_ADVICE = (
    "Merge it and train a new adapter: pipeline.load_lora_weights(FILE); pipeline.fuse_lora(); "
    "pipeline.unload_lora_weights(); pipeline.save_pretrained(FOLDER)"
)
_DENOISER = "denoiser"
# Beginnings of names, and the place of the network in a pipeline. The first that fits counts.
_PLACES = {
    **dict.fromkeys(("lora_te_", "lora_te1_", "text_encoder.", "text_encoders.clip_l.transformer."), "text_encoder"),
    **dict.fromkeys(("lora_te2_", "text_encoder_2.", "text_encoders.clip_g.transformer."), "text_encoder_2"),
    **dict.fromkeys(("lora_te3_", "text_encoder_3.", "text_encoders.t5xxl.transformer."), "text_encoder_3"),
    **dict.fromkeys(("lora_unet_", "lora_transformer_", "lycoris_", "unet.", "transformer."), _DENOISER),
    **dict.fromkeys(("model.diffusion_model.", "diffusion_model.", "base_model.model.", ""), _DENOISER),
}
# Ends of names, and the kind of the tensor.
_ENDS = {
    r"\.lora_down\.weight": "down", r"\.lora_up\.weight": "up", r"\.lora_mid\.weight": "mid",
    r"\.lora_A(\.\w+)?\.weight": "down", r"\.lora_B(\.\w+)?\.weight": "up",
    r"[._]lora\.down\.weight": "down", r"[._]lora\.up\.weight": "up",
    r"\.lora_linear_layer\.down\.weight": "down", r"\.lora_linear_layer\.up\.weight": "up",
    r"(?<=_lora[12])\.down\.weight": "down", r"(?<=_lora[12])\.up\.weight": "up",
    r"\.dora_scale": "magnitude", r"\.lora_magnitude_vector(\.\w+)?": "magnitude", r"\.alpha": "alpha",
    r"\.(?P<lycoris>lokr_w[12](_[ab])?|lokr_t2|hada_[wt][12](_[ab])?)": "",
}  # fmt: skip
_LORA = {"down", "up", "mid", "alpha", "magnitude"}
# Parts of names by which people know a family.
_FAMILIES = {
    "Flux": ("double_blocks", "single_blocks", "single_transformer_blocks"),
    "SD3": ("joint_blocks",),
    "Stable Diffusion or SDXL": ("input_blocks", "output_blocks", "down_blocks", "up_blocks"),
}
Layers = dict[tuple[str, str], dict[str, Tensor]]  # tensors by kind, of each place and name


@dataclass(frozen=True)
class LoraFile:
    """Adapters of a file.

    Args:
        name: The file, for messages.
        layers: Tensors by kind (``down``, ``up``, ``lokr_w1``, ...) for each place and name of a layer.
        header: Configuration of peft in the file's header, whose keys begin with the place.
        said: Beginning of messages: the argument and the file.
    """

    name: str
    layers: Layers
    header: Fields
    said: str

    @property
    def method(self) -> str:
        """Return the kind of the adapters: ``lora``, ``lokr`` or ``loha``; raise an error for several."""
        kinds = {kind for tensors in self.layers.values() for kind in tensors} - {"alpha"}
        if kinds <= _LORA:
            return "lora"
        for method, prefix in (("lokr", "lokr_"), ("loha", "hada_")):
            if all(kind.startswith(prefix) for kind in kinds):
                return method
        raise ConfigurationError(f"{self.said} has adapters of several methods ({listed(sorted(kinds))}). {_ADVICE}")

    def fields(self) -> dict[str, Any]:
        """Return the arguments of LoRA that do not depend on the network: rank, alpha and variant."""
        if self.method != "lora":
            raise ConfigurationError(
                f"{self.said} has adapters of LyCORIS's {self.method}: use PeftAdapter with "
                f"config: {{start_from: {self.name}}}"
            )
        broken = [f"{place} {name}" for (place, name), one in self.layers.items() if not {"down", "up"} <= one.keys()]
        if broken:
            raise ConfigurationError(f"{self.said} lacks factors of {listed(broken)}")
        with_magnitude = [layer for layer, one in self.layers.items() if "magnitude" in one]
        if len(with_magnitude) not in (0, len(self.layers)):
            raise ConfigurationError(
                f"{self.said} has DoRA's magnitudes in {len(with_magnitude)} of "
                f"{len(self.layers)} layers, and LoRA trains one variant. {_ADVICE}"
            )
        scale = Counter(self.scale(*layer) for layer in self.layers).most_common(1)[0][0]
        rank = max(one["down"].shape[0] for one in self.layers.values())
        return {"rank": rank, "alpha": scale * rank, "variant": "dora" if with_magnitude else "lora"}

    def scale(self, place: str, name: str) -> float:
        """Return the factor of B A in a layer."""
        tensors = self.layers[place, name]
        rank = tensors["down"].shape[0]
        if "alpha" in tensors:
            return float(tensors["alpha"]) / rank
        prefixes = ("unet", "transformer") if place == _DENOISER else (place,)
        own = {key.partition(".")[2]: value for key, value in self.header.items() if key.partition(".")[0] in prefixes}
        if "lora_alpha" not in own:
            return 1.0
        alpha = own["lora_alpha"]
        for pattern, value in (own.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                alpha = value
        return alpha / math.sqrt(rank) if own.get("use_rslora") else alpha / rank


def pipeline_file(place: Path) -> Path | None:
    """Return the file of a LoRA of an image program, which is given or is in a folder; None for peft's folder."""
    if place.is_file():
        return place
    if (place / "adapter_config.json").is_file() or not place.is_dir():
        return None
    files = sorted(place.glob("*.safetensors"))
    return next((file for file in files if file.name == LORA_FILE), files[0] if len(files) == 1 else None)


def read_lora_file(file: Path, argument: str = "LoRA: start_from") -> LoraFile:
    """Read a file that an argument names.

    Raises:
        CheckpointError: If the file is damaged.
        ConfigurationError: For tensors of unknown names.
    """
    said = f"{argument}={file}"
    layers: Layers = {}
    unknown = []
    for key, tensor in load_tensors(file).items():
        split = _split(key)
        if split is None:
            unknown.append(key)
        else:
            place, name, kind = split
            if key.endswith(".dora_scale") and tensor.ndim > 1 and len(tensor) == 1:
                raise ConfigurationError(
                    f"{said}: {key} has a magnitude for each input, and magnitudes of outputs are supported. {_ADVICE}"
                )
            layers.setdefault((place, name), {})[kind] = tensor
    if not unknown and not layers:
        raise ConfigurationError(f"{said} has no tensors: its training or its copy did not finish")
    if unknown:
        raise ConfigurationError(
            f"{said} has {len(unknown)} tensors that are unknown here: {listed(unknown)}. {_ADVICE}"
        )
    header = json.loads((map_tensors(file).metadata() or {}).get("lora_adapter_metadata", "{}"))
    return LoraFile(str(file), layers, header, said)


def _split(key: str) -> tuple[str, str, str] | None:
    """Return the place, the layer's name and the kind of a tensor, or None for an unknown one."""
    for end, kind in _ENDS.items():
        match = re.fullmatch(f"(?P<layer>.+?){end}", key)
        if match:
            prefix = next(prefix for prefix in _PLACES if match["layer"].startswith(prefix))
            named = match.groupdict().get("lycoris")
            return _PLACES[prefix], match["layer"].removeprefix(prefix), named or kind
    return None


def placed_factors(file: LoraFile, module: nn.Module, rank: int, scale: float) -> dict[str, Tensor]:
    """Return the factors of a file by this package's names in a module, for adapters of one rank and scale.

    Args:
        file: The file.
        module: Module with a network of diffusers, and the text encoders that train.
        rank: Rank of the adapters, at least that of each layer in the file.
        scale: Factor of B A.

    Raises:
        ConfigurationError: If the file belongs to another network.
    """
    found = {}
    for layer, tensors, original, prefix in placed_layers(file, module):
        factor = file.scale(*layer) / scale
        down, up = _two_factors(tensors)
        up = up * factor
        rows = [_outputs(module.get_submodule(prefix + part)) for part in original.parts]
        ups = _unstacked(up, rows, original)
        sizes = _unstacked(tensors["magnitude"].flatten(), rows, original) if "magnitude" in tensors else []
        for number, part in enumerate(original.parts):
            name = prefix + part
            if getattr(module.get_submodule(name), "groups", 1) > 1:
                raise ConfigurationError(
                    f"{file.said} adapts {name}, a convolution in groups, and LoRA adapts convolutions without groups. "
                    f"{_ADVICE}"
                )
            weight_shape = _weight_shape(module.get_submodule(name))
            a, b = _padded(down, ups[number], rank)
            found[f"{name}.lora_A"] = a.reshape(rank, *weight_shape[1:])
            found[f"{name}.lora_B"] = b.reshape(-1, rank, *[1] * (len(weight_shape) - 2))
            if sizes:
                found[f"{name}.lora_magnitude"] = sizes[number].float()
    return found


def placed_layers(
    file: LoraFile, module: nn.Module
) -> Iterator[tuple[tuple[str, str], dict[str, Tensor], OriginalLayer, str]]:
    """Yield for each layer of a file its key and tensors, the layers of a network for which it is, and their prefix.

    Raises:
        ConfigurationError: If the file belongs to another network: unknown names, or other shapes.
    """
    networks = networks_of(module)
    aliases = {place: _aliases(network) for place, (_, network) in networks.items()}
    missing = sorted({place for place, _ in file.layers} - aliases.keys())
    if missing:
        names = [name for place, name in file.layers if place in missing]
        raise ConfigurationError(
            f"{file.said} has adapters of {len(names)} layers of {' and '.join(missing)}, which "
            f"this run does not train. Train these networks, too, or merge the file and train a new adapter. {_ADVICE}"
        )
    matched = {layer: aliases[layer[0]].get(_flat(layer[1])) for layer in file.layers}
    unknown = [name for (_, name), original in matched.items() if original is None]
    if unknown:
        kinds = " and ".join(unmixed(network).__name__ for _, network in networks.values())
        raise ConfigurationError(
            f"{file.said} does not fit {kinds}: {len(unknown)} of its {len(matched)} layers are "
            f"not in it, such as {unknown[0]!r}{_family(unknown)}"
        )
    for layer, original in matched.items():
        assert original is not None
        prefix, network = networks[layer[0]]
        _check_shapes(file, layer, network, original)
        yield layer, file.layers[layer], original, prefix


def networks_of(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Return the networks of a pipeline in a module by their places, each with the prefix of its names.

    The places are ``denoiser``, and ``text_encoder``, ``text_encoder_2``, ... T5 is also ``text_encoder_3``.
    """
    found: list[Fields] = []
    part: Any
    for name, part in module.named_modules():
        above = any(not one["name"] or name.startswith(f"{one['name']}.") for one in found)
        kind = unmixed(part).__name__
        if (
            above
            or kind.startswith("Autoencoder")
            or not (hasattr(part, "save_pretrained") and hasattr(part, "config"))
        ):
            continue
        library = "diffusers" if any(one.__module__.startswith("diffusers.") for one in type(part).__mro__) else ""
        found.append({"name": name, "library": library, "class": kind})
    networks = {}
    if not any(one["library"] for one in found):
        return {}
    for name, place in places_of(found).items():
        network = module.get_submodule(name)
        prefix = f"{name}." if name else ""
        networks[_DENOISER if place in ("unet", "transformer") else place] = (prefix, network)
        if unmixed(network).__name__.startswith("T5"):
            networks["text_encoder_3"] = (prefix, network)
    return networks


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


def _aliases(network: nn.Module) -> dict[str, OriginalLayer]:
    """Return the layers of a network by all names that files use for them."""
    found: dict[str, OriginalLayer] = {}
    for name, part in network.named_modules():
        if not isinstance(part, nn.Linear | nn.Conv2d):
            continue
        layer = OriginalLayer(name, (name,))
        found[_flat(name)] = layer
        found[_flat(name.removesuffix(".0"))] = layer  # earlier diffusers: to_out
        text = f"text_model.{name.removeprefix('text_model.')}"
        for one in (name, text, text.removeprefix("text_model.")):
            for ours, earlier in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("out_proj", "to_out")):
                found.setdefault(_flat(one.replace(f"self_attn.{ours}", f"self_attn.{earlier}")), layer)
            found.setdefault(_flat(one), layer)
    for layer in [*original_layers(network), *xlabs_layers(network)]:
        found.setdefault(_flat(layer.name), layer)
    return found


def _flat(name: str) -> str:
    return name.replace(".processor", "").replace(".", "_")


def _family(names: Sequence[str]) -> str:
    """Return words about the family of unknown layers."""
    for family, parts in _FAMILIES.items():
        if any(_flat(part) in _flat(name) for part in parts for name in names):
            return f". It looks like a LoRA of {family}"
    return ""


def _outputs(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _weight_shape(layer: Any) -> tuple[int, ...]:
    """Return the shape of a layer's weight, which may hold packed codes of another shape."""
    if isinstance(layer, nn.Linear):
        return (layer.out_features, layer.in_features)
    return tuple(layer.weight.shape)


def _check_shapes(file: LoraFile, layer: tuple[str, str], network: nn.Module, original: OriginalLayer) -> None:
    tensors = file.layers[layer]
    if "down" not in tensors:
        return
    parts = [network.get_submodule(part) for part in original.parts]
    inputs = math.prod(_weight_shape(parts[0])[1:])
    outputs = sum(map(_outputs, parts))
    down, up = _two_factors(tensors)
    if (down[0].numel(), up.shape[0]) != (inputs, outputs):
        raise ConfigurationError(
            f"{file.said} does not fit {unmixed(network).__name__}: {layer[1]!r} has "
            f"{down[0].numel()} inputs and {up.shape[0]} outputs there, and {inputs} and {outputs} in this network. It "
            "is a LoRA of another model, such as Stable Diffusion 1.5 in the place of SDXL"
        )
    magnitude = tensors.get("magnitude")
    if magnitude is not None and magnitude.numel() != outputs:
        raise ConfigurationError(f"{file.said}: {layer[1]!r} has {magnitude.numel()} magnitudes, and {outputs} outputs")


def _two_factors(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B in float32, A with the kernel that LyCORIS keeps in a third factor."""
    down = tensors["down"].float()
    up = tensors["up"].float()
    if "mid" in tensors:
        down = torch.einsum("pqhw,qi->pihw", tensors["mid"].float(), down.flatten(1))
    return down, up.flatten(1)


def _unstacked(stacked: Tensor, rows: Sequence[int], original: OriginalLayer) -> list[Tensor]:
    """Return the rows of each layer of diffusers."""
    if original.swapped:
        stacked = torch.cat(stacked.chunk(2)[::-1])
    return list(stacked.split(list(rows)))


def _padded(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of a larger rank with the same product, whose further rows of A can train."""
    more = rank - a.shape[0]
    if not more:
        return a, b
    generator = torch.Generator().manual_seed(more)
    bound = 1 / math.sqrt(a[0].numel())
    rows = (torch.rand((more, *a.shape[1:]), generator=generator, device="cpu") * 2 - 1) * bound
    return torch.cat((a, rows)), torch.cat((b, b.new_zeros(len(b), more)), dim=1)

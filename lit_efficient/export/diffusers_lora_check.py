"""Check of adapters for diffusers: its own loaders read the folder, and each layer's update is compared with the run's.

    update of a layer for a fixed input x:    s B A x,  and DoRA's magnitude

The networks get no weights, so that only the adapters take memory. The loader is ``load_lora_weights`` of
a pipeline with these networks; ``load_lora_adapter`` of the network if no pipeline has it; else peft's own.
The files in kohya's and LyCORIS's formats are read by the reader of ``start_from``. The changes of weights by the
latter are computed by its formula, and compared with those of peft's layers.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.mechanisms.adapters.diffusers_lora import KOHYA_FILE, skeleton
from lit_efficient.mechanisms.adapters.lora_files import placed_factors, placed_layers, places_of, read_lora_file
from lit_efficient.mechanisms.adapters.low_rank import scale_of
from lit_efficient.mechanisms.adapters.lycoris import LYCORIS_FILE, delta_of

_Part = Mapping[str, Any]  # see `peft_folder.placement`


def updates_of(
    state: Mapping[str, Tensor], where: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the update of each adapted layer of a checkpoint for a fixed input, and DoRA's magnitudes."""
    root = f"{where['root']}." if where["root"] else ""
    alphas = where.get("alphas", {})
    found = {}
    for part, place in places_of(where["networks"]).items():
        prefix = f"{part}." if part else ""
        for name in where["kinds"]:
            full = f"{root}{name}"
            if not full.startswith(prefix):
                continue
            key = f"{place}.{full.removeprefix(prefix)}"
            rank = len(state[f"{full}.lora_A"])
            scale = scale_of(arguments["variant"], alphas.get(name, arguments["alpha"]), rank)
            found[key] = scale * _product(state[f"{full}.lora_A"], state[f"{full}.lora_B"])
            if f"{full}.lora_A0" in state:
                found[key] -= scale * _product(state[f"{full}.lora_A0"], state[f"{full}.lora_B0"])
            if f"{full}.lora_magnitude" in state:
                found[f"{key}.magnitude"] = state[f"{full}.lora_magnitude"].flatten().float()
    return found


def loaded_updates(folder: Path, parts: Sequence[_Part]) -> tuple[dict[str, Tensor], str]:
    """Return the updates as diffusers or peft loads them from a folder, and the name of the loader."""
    places = places_of(parts)
    # Pages that nobody writes take no memory.
    networks = {places[part["name"]]: skeleton(part).to_empty(device="cpu") for part in parts}
    loader = _load(folder, networks)
    found = {}
    for place, network in networks.items():
        for name, layer in network.named_modules():
            if hasattr(layer, "lora_A") and hasattr(layer, "scaling") and layer.lora_A:
                (adapter,) = layer.lora_A
                key = f"{place}.{name}"
                pair = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                found[key] = layer.scaling[adapter] * _product(*pair)
                if adapter in layer.lora_magnitude_vector:
                    found[f"{key}.magnitude"] = layer.lora_magnitude_vector[adapter].weight.flatten().float()
    return found, loader


def kohya_updates(folder: Path, parts: Sequence[_Part]) -> dict[str, Tensor]:
    """Return the updates of the file in kohya's format by the names of :func:`loaded_updates`; nothing without it.

    Layers that the authors stack are taken apart, so that parts without adapters have updates of zero.
    """
    if not (folder / KOHYA_FILE).is_file():
        return {}
    places = places_of(parts)
    root = torch.nn.ModuleDict({places[part["name"]]: skeleton(part) for part in parts})
    file = read_lora_file(folder / KOHYA_FILE, "export")
    fields = file.fields()
    scale = fields["alpha"] / fields["rank"]
    factors = placed_factors(file, root, fields["rank"], scale)
    found = {}
    for key, tensor in factors.items():
        name, _, kind = key.rpartition(".")
        if kind == "lora_A":
            found[name] = scale * _product(tensor, factors[f"{name}.lora_B"])
        if kind == "lora_magnitude":
            found[f"{name}.magnitude"] = tensor.flatten().float()
    return found


@torch.no_grad()
def lycoris_changes(folder: Path, part: _Part) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the name of each layer, and the changes of its weight by peft and by LyCORIS's file; None without any."""
    from peft import PeftModel

    file = read_lora_file(folder / LYCORIS_FILE, "export")
    left = {original.parts[0]: own for _, own, original, _ in placed_layers(file, skeleton(part))}
    network = PeftModel.from_pretrained(skeleton(part).to_empty(device="cpu"), folder).get_base_model()
    for name, layer in network.named_modules():
        if hasattr(layer, "get_delta_weight"):
            own = left.pop(name, None)
            change = layer.get_delta_weight("default").flatten().float()
            yield name, change, None if own is None else delta_of(own).flatten()
    for name, own in left.items():
        yield name, None, delta_of(own)


@torch.no_grad()
def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return B A x for a fixed x."""
    a = a.flatten(1).float()
    x = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
    return b.flatten(1).float() @ (a @ x)


def _load(folder: Path, networks: dict[str, Any]) -> str:
    for kind in _pipelines(networks):
        pipeline = kind.__new__(kind)
        # The other parts of the pipeline have no default, or None.
        parameters = inspect.signature(kind).parameters.values()
        others = [one.name for one in parameters if one.default in (None, one.empty)]
        pipeline.register_modules(**{**dict.fromkeys(others), **networks})
        pipeline.load_lora_weights(folder)
        return f"load_lora_weights of {kind.__name__}"
    if len(networks) > 1:
        named = ", ".join(f"{place} {type(network).__name__}" for place, network in networks.items())
        raise ValueError(f"no pipeline of diffusers loads adapters of {named}")
    ((place, network),) = networks.items()
    if hasattr(network, "load_lora_adapter"):
        network.load_lora_adapter(folder, prefix="base_model.model", weight_name="adapter_model.safetensors")
        return f"load_lora_adapter of {type(network).__name__}"
    from peft import PeftModel

    networks[place] = PeftModel.from_pretrained(network, folder).get_base_model()
    return "peft"


def _pipelines(networks: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the pipelines that load adapters of these networks, by the annotations of their constructors."""
    from diffusers.pipelines import auto_pipeline

    for kind in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values():
        wanted = kind.__init__.__annotations__
        fits = all(type(network).__name__ in str(wanted.get(place)) for place, network in networks.items())
        if fits and hasattr(kind, "load_lora_weights"):
            yield kind

"""LoKr and LoHa of LyCORIS in the layers of peft: reading and writing of files for image programs.

    LoKr   W + s (w1 kron w2),     w1 and w2 whole, or products of two factors
    LoHa   W + s (w1_a w1_b) * (w2_a w2_b)

    lora_unet_NAME.lokr_w1, .lokr_w2_a, ..., .alpha      kohya's names for a UNet
    lycoris_NAME.hada_w1_a, ..., .alpha                  LyCORIS's own, for any network

Layers that the authors of SD3 and Flux stack are split for LoHa. Kronecker factors of LoKr cannot be split.
s is alpha divided by the rank of the factors, and 1 where w1 and w2 are whole.
Source: Yeh et al. (2023), https://arxiv.org/abs/2309.14859; https://github.com/KohakuBlueleaf/LyCORIS.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tensors import save_tensors
from lit_efficient.mechanisms.adapters.lora_files import (
    LoraFile,
    networks_of,
    pipeline_file,
    placed_layers,
    read_lora_file,
)
from lit_efficient.mechanisms.adapters.peft_folder import target_modules
from lit_efficient.models.libraries.original_names import original_layers

LYCORIS_FILE = "lycoris.safetensors"
_PEFT = "base_model.model."
_ROWS = ("hada_w1_a", "hada_w2_a")  # factors of LoHa with a row for each output
_LOHA = {*_ROWS, "hada_w1_b", "hada_w2_b", "alpha"}  # without the kernels of Tucker's decomposition
_WHOLE = 10_000  # a rank at which peft keeps w2 whole, as in LyCORIS's configurations


def is_lycoris(place: str) -> bool:
    """Return whether a path is a file of an image program and not a folder of peft."""
    return pipeline_file(Path(place)) is not None


def read_lycoris(place: str, root: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's options for the adapters of a file, and the tensors by the names of peft's file.

    Args:
        place: The file.
        root: The network.

    Raises:
        ConfigurationError: If the file has another method, or belongs to another network.
    """
    file = read_lora_file(pipeline_file(Path(place)) or Path(place), "PeftAdapter: start_from")
    if file.method == "lora":
        raise ConfigurationError(f"PeftAdapter: {place} has factors of LoRA: use LoRA with start_from: {place}")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    parts: dict[str, Mapping[str, Tensor]] = {}
    for _, own, original, prefix in placed_layers(file, root):
        if (len(original.parts) > 1 or original.swapped) and not own.keys() <= _LOHA:
            raise ConfigurationError(
                f"PeftAdapter: {place} adapts {original.name} as one layer, which diffusers splits into "
                f"{', '.join(original.parts)}. Kronecker factors of the parts have shapes that peft does not make. "
                "Merge the file into the base by the program that trained it, and train a new adapter on the result, "
                "or use LoHa, or a file with the layers of diffusers, such as SimpleTuner's"
            )
        layers: list[Any] = [root.get_submodule(prefix + name) for name in original.parts]
        rows = [len(layer.weight) for layer in layers]
        for name, factors in zip(original.parts, _split_rows(own, rows, original.swapped)):
            parts[name] = factors
            rank = _rank(factors)
            ranks[name] = rank or _WHOLE
            alphas[name] = ranks[name]
            if rank and "alpha" in own:
                alphas[name] = float(own["alpha"])
            tensors |= {f"{_PEFT}{name}.{kind}": tensor.float() for kind, tensor in factors.items()}
    everything = [name for name, _ in root.named_modules() if name]
    options: dict[str, Any] = {"peft_type": file.method.upper(), "target_modules": target_modules(parts, everything)}
    options |= _with_patterns("r", "rank_pattern", ranks) | _with_patterns("alpha", "alpha_pattern", alphas)
    options["use_effective_conv2d"] = any("lokr_t2" in own or "hada_t1" in own for own in parts.values())
    if file.method == "lokr":
        options |= _decomposition(file, root, parts)
    return options, tensors


def _split_rows(own: Mapping[str, Tensor], rows: Sequence[int], swapped: bool) -> list[dict[str, Tensor]]:
    """Return the factors of each of the layers that the authors stack: a row of LoHa needs that row of w1_a and w2_a.

    Args:
        own: Factors of the authors' layer.
        rows: Outputs of each layer of diffusers; a single one takes all factors as they are.
        swapped: Whether the halves of the outputs change places.
    """
    factors = {kind: tensor for kind, tensor in own.items() if kind != "alpha"}
    if len(rows) == 1 and not swapped:
        return [factors]
    split = {}
    for kind in _ROWS:
        whole = factors.pop(kind)
        if swapped:
            whole = torch.cat(whole.chunk(2)[::-1])
        split[kind] = whole.split(list(rows))
    return [factors | {kind: split[kind][number] for kind in _ROWS} for number in range(len(rows))]


def write_lycoris(folder: Path, tensors: Mapping[str, Tensor], options: Mapping[str, Any], network: nn.Module) -> None:
    """Write LoKr or LoHa for image programs to a folder; nothing for other methods and networks.

    Args:
        folder: The folder.
        tensors: Tensors by the names of peft's file.
        options: Options of peft.
        network: The network, which may have no memory for its weights.
    """
    if options["peft_type"] not in ("LOKR", "LOHA") or not networks_of(network):
        return
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(_PEFT).rpartition(".")
        layers.setdefault(name, {})[kind] = tensor
    named: dict[str, Tensor] = {}
    for name, key in _written_names(network, layers):
        own = dict(layers[name])
        scale = _of_layer(options, "alpha", "alpha_pattern", name) / _of_layer(options, "r", "rank_pattern", name)
        rank = _rank(own)
        if not rank:  # readers take 1 as the scale
            own["lokr_w1"] = own["lokr_w1"] * scale
        named |= {f"{key}.{kind}": tensor for kind, tensor in own.items()}
        named[f"{key}.alpha"] = torch.tensor(float(scale * rank) if rank else 1.0)
    save_tensors(folder / LYCORIS_FILE, named, format="pt")


def delta_of(own: Mapping[str, Tensor]) -> Tensor:
    """Return the change of a layer's weight, as LyCORIS and ComfyUI compute it from the tensors of a file.

    Args:
        own: Tensors of the layer by kind, with ``alpha``.

    Returns:
        The change in float32, whose elements are in the order of the weight's.
    """
    tensors = {kind: tensor.float() for kind, tensor in own.items()}

    def product(a: str, b: str, core: str) -> Tensor:
        if core in tensors:
            return torch.einsum("ijkl,ip,jr->prkl", tensors[core], tensors[a], tensors[b])
        return tensors[a] @ tensors[b]

    rank = _rank(tensors)
    scale = float(tensors["alpha"]) / rank if rank else 1.0
    if "hada_w1_a" in tensors:
        first = product("hada_w1_a", "hada_w1_b", "hada_t1")
        return scale * first * product("hada_w2_a", "hada_w2_b", "hada_t2")
    w1 = tensors["lokr_w1"] if "lokr_w1" in tensors else product("lokr_w1_a", "lokr_w1_b", "")
    w2 = tensors["lokr_w2"] if "lokr_w2" in tensors else product("lokr_w2_a", "lokr_w2_b", "lokr_t2")
    return scale * torch.kron(w1.reshape(*w1.shape, *[1] * (w2.ndim - 2)), w2.contiguous())


def _written_names(network: Any, layers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of layers in diffusers and in the file."""
    names: dict[str, str] = {}
    prefix = "lycoris_"
    if type(network).__name__.startswith("UNet"):
        prefix = "lora_unet_"
        if network.config.addition_embed_type == "text_time":  # SDXL, by the names of its authors
            names = {layer.parts[0]: layer.name for layer in original_layers(network)}
    for name in layers:
        yield name, prefix + names.get(name, name).replace(".", "_")


def _rank(tensors: Mapping[str, Tensor]) -> int:
    """Return the rank of the factors of a layer; 0 where none is factorised."""
    for kind, dim in (("lokr_w2_b", 0), ("lokr_w1_b", 0), ("hada_w1_b", 0)):
        if kind in tensors:
            return int(tensors[kind].shape[dim])
    return 0


def _with_patterns(argument: str, pattern: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the most frequent value, and a pattern for the layers with another one."""
    usual = Counter(values.values()).most_common(1)[0][0]
    others = {f"^{name}$".replace(".", r"\."): value for name, value in values.items() if value != usual}
    return {argument: usual, pattern: others}


def _of_layer(options: Mapping[str, Any], argument: str, pattern: str, name: str) -> float:
    for one, value in (options.get(pattern) or {}).items():
        if re.fullmatch(rf"(.*\.)?({one})", name):
            return float(value)
    return float(options.get(argument, 8))  # the default of peft


def _decomposition(file: LoraFile, root: Any, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the options of LoKr with which peft makes factors of the file's shapes."""
    from peft.tuners.lokr.layer import factorization

    shapes = {}
    for name, own in parts.items():
        first = own["lokr_w1"].shape if "lokr_w1" in own else (len(own["lokr_w1_a"]), own["lokr_w1_b"].shape[1])
        weight = root.get_submodule(name).weight
        shapes[name] = tuple(first), (weight.shape[0], weight.shape[1])
    unfit: dict[int, list[str]] = {}
    for factor in (-1, *sorted({side for w1, _ in shapes.values() for side in w1})):
        unfit[factor] = []
        for name, (w1, sizes) in shapes.items():
            if w1 != tuple(factorization(size, factor)[0] for size in sizes):
                unfit[factor].append(name)
        if not unfit[factor]:
            both = any("lokr_w1_a" in own for own in parts.values())
            return {"decompose_factor": factor, "decompose_both": both}
    best = min(unfit, key=lambda factor: len(unfit[factor]))
    name = unfit[best][0]
    w1, sizes = shapes[name]
    theirs = tuple(factorization(size, best)[0] for size in sizes)
    raise ConfigurationError(
        f"PeftAdapter: {file.name} has Kronecker factors that peft cannot make with one decompose_factor. "
        f"decompose_factor {best} fits {len(shapes) - len(unfit[best])} of {len(shapes)} layers, and not {name!r}: "
        f"lokr_w1 of its weight {sizes} is {w1} in the file and {theirs} in peft. Files that LyCORIS trains with "
        "factor -1, balanced, always fit, and others unless the factor divides a side that is smaller than its square. "
        "Merge the file into the base by the program that trained it, and train a new adapter on the result"
    )

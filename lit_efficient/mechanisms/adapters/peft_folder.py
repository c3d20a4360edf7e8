"""Reading of LoRA adapters that peft has saved: arguments of LoRA, and initial values of its adapters.

    adapter_config.json + adapter_model.safetensors  ->  rank, alpha, targets, ...  ->  lora_A, lora_B, modules_to_save

The adapted layers are those with tensors in the file. Options that LoRA does not support raise an error.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors

_OURS = {  # ends of peft's tensor names, and the corresponding names of this package
    ".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_A", ".lora_embedding_B": "lora_B",
    ".lora_magnitude_vector": "lora_magnitude", ".lora_magnitude_vector.weight": "lora_magnitude",
}  # fmt: skip
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that do not change the base
_UNSUPPORTED = ("use_qalora", "alora_invocation_tokens", "arrow_config", "layer_replication", "alpha_pattern")


def read_adapter(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder that peft has saved.

    Returns:
        Arguments of LoRA, and the tensors by this package's names in the adapted model.

    Raises:
        CheckpointError: If a file is missing or damaged.
        ConfigurationError: If the adapter is not LoRA, or uses an unsupported option.
    """
    place = Path(folder)
    check_sums(place)
    try:
        config = json.loads((place / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place / 'adapter_config.json'} cannot be read: {error}") from error
    found = load_tensors(place / "adapter_model.safetensors")
    if config.get("peft_type") != "LORA":
        raise ConfigurationError(
            f"LoRA: start_from={folder} has peft_type {config.get('peft_type')}, not LORA. Use PeftAdapter for others"
        )
    tensors = dict(_named(name, tensor) for name, tensor in found.items())
    layers = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    ranks = {tensors[f"{name}.lora_A"].shape[0] for name in layers}
    other = [f"{key}={config[key]!r}" for key in _UNSUPPORTED if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        other.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if ranks != {config["r"]}:
        other.append(f"ranks {sorted(ranks)}")
    if other:
        raise ConfigurationError(
            f"LoRA: start_from={folder} has {other[0]}, which LoRA does not support. Merge the adapter into its base"
        )
    variant = "lora"
    if config.get("use_dora"):
        variant = "dora"
    elif config.get("use_rslora"):
        variant = "rslora"
    biases = {name for name in tensors if name.endswith(".bias") and config.get("bias", "none") != "none"}
    whole = {name.rpartition(".")[0] for name in tensors if ".lora_" not in name and name not in biases} - {*layers}
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": [re.escape(name) for name in layers],
        "dropout": config.get("lora_dropout", 0.0),
        "variant": variant,
        "bias": config.get("bias", "none"),
        "modules_to_save": [re.escape(name) for name in sorted(whole)] or None,
    }, tensors


def _named(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return this package's name and shape of a tensor of peft."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    end = next((end for end in _OURS if name.endswith(end)), None)
    if end is None:
        return name, tensor
    last = _OURS[end]
    return f"{name.removesuffix(end)}.{last}", tensor.flatten() if last == "lora_magnitude" else tensor


@torch.no_grad()
def start_adapters(module: nn.Module, tensors: Mapping[str, Tensor], trained: list[nn.Parameter], folder: str) -> None:
    """Copy the tensors of :func:`read_adapter` into a module with adapters of the same layers.

    Args:
        module: The module.
        tensors: The tensors by name.
        trained: The parameters that will train.
        folder: Folder of the adapter, for messages.

    Raises:
        ConfigurationError: If a tensor has no place or another shape, if an adapter would get no values, or if the
            value of a frozen parameter would change.
    """
    own = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    first = next(iter(tensors))
    prefix = min((name.removesuffix(first) for name in own if f".{name}".endswith(f".{first}")), key=len, default="")
    places = {name: own.get(f"{prefix}{name}") for name in tensors}
    wrong = [name for name, place in places.items() if place is None or place.shape != tensors[name].shape]
    factors = [name for name, _ in module.named_parameters() if f".{name}".rpartition(".")[2].startswith("lora_")]
    wrong += [name for name in factors if name.removeprefix(prefix) not in tensors]
    if wrong:
        raise ConfigurationError(
            f"LoRA: start_from={folder} does not fit {type(module).__name__}: {len(wrong)} tensors are missing or have "
            f"another shape, first {wrong[0]!r}. Leave targets out, and use the network for which the adapter was made"
        )
    still = {id(parameter) for parameter in trained}
    for name, place in places.items():
        assert place is not None
        if torch.equal(place, tensors[name].to(place)):  # peft also saves the frozen weight of an adapted embedding
            continue
        if isinstance(place, nn.Parameter) and id(place) not in still:
            raise ConfigurationError(
                f"LoRA: start_from={folder} has another value of {name!r}, which is frozen in this module. Use the "
                "base with which the adapter was trained, and leave bias and modules_to_save out"
            )
        place.copy_(tensors[name])
    for name, place in places.items():
        if place is not None and not torch.equal(place, tensors[name].to(place)):
            raise ConfigurationError(
                f"LoRA: start_from={folder} has two values of {name!r}, which is a tied parameter in this module. "
                "Untie the layers, or train a new adapter"
            )

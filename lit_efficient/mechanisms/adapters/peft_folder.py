"""A folder that peft has saved, as arguments of LoRA and as the start of its adapters.

    adapter_config.json + adapter_model.safetensors  ->  rank, alpha, targets, ...  ->  lora_A, lora_B, modules_to_save

The layers are those that the file has tensors of. What LoRA would compute differently is refused.
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

_OURS = {  # last parts of a tensor's name there, and what they are here
    ".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_A", ".lora_embedding_B": "lora_B",
    ".lora_magnitude_vector": "lora_magnitude", ".lora_magnitude_vector.weight": "lora_magnitude",
}  # fmt: skip
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # those that leave the base as it was
_ELSEWHERE = ("use_qalora", "alora_invocation_tokens", "arrow_config", "layer_replication", "alpha_pattern")


def read_adapter(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of LoRA, and tensors by the names that they have here, without that of the adapted model in front.

    Raises:
        CheckpointError: If a file is missing or damaged.
        ConfigurationError: If it is not LoRA, or a kind of it that LoRA here does not have.
    """
    place = Path(folder)
    check_sums(place)
    try:
        config = json.loads((place / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place / 'adapter_config.json'} cannot be read: {error}") from error
    found = load_tensors(place / "adapter_model.safetensors")
    if config.get("peft_type") != "LORA":
        raise ConfigurationError(f"LoRA: start_from {folder} is an adapter of {config.get('peft_type')}, not of LORA")
    tensors = dict(_named(name, tensor) for name, tensor in found.items())
    layers = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    ranks = {tensors[f"{name}.lora_A"].shape[0] for name in layers}
    other = [f"{key}={config[key]!r}" for key in _ELSEWHERE if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        other.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if other or ranks != {config["r"]}:
        what = other[0] if other else f"ranks {sorted(ranks)}"
        raise ConfigurationError(
            f"LoRA: start_from {folder} has {what}, which is not known here: merge it into its base"
        )
    biases = {name for name in tensors if name.endswith(".bias") and config.get("bias", "none") != "none"}
    whole = {name.rpartition(".")[0] for name in tensors if ".lora_" not in name and name not in biases} - {*layers}
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": [re.escape(name) for name in layers],
        "dropout": config.get("lora_dropout", 0.0),
        "variant": "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora",
        "bias": config.get("bias", "none"),
        "modules_to_save": [re.escape(name) for name in sorted(whole)] or None,
    }, tensors


def _named(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    end = next((end for end in _OURS if name.endswith(end)), None)
    if end is None:
        return name, tensor
    last = _OURS[end]
    return f"{name.removesuffix(end)}.{last}", tensor.flatten() if last == "lora_magnitude" else tensor


@torch.no_grad()
def start_adapters(module: nn.Module, tensors: Mapping[str, Tensor], trained: list[nn.Parameter], folder: str) -> None:
    """Copy the tensors of :func:`read_adapter` into a module whose same layers have adapters now.

    Raises:
        ConfigurationError: If they do not fit, if some would be frozen, or if an adapter would be left without.
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
            f"LoRA: start_from {folder} does not fit {type(module).__name__}: {len(wrong)} tensors are missing or of "
            f"another shape, first {wrong[0]!r}. Leave targets out, and give the network that the adapter is for"
        )
    still = {id(parameter) for parameter in trained}
    for name, place in places.items():
        assert place is not None
        if torch.equal(place, tensors[name].to(place)):  # peft saves embeddings with the adapter that they have
            continue
        if isinstance(place, nn.Parameter) and id(place) not in still:
            raise ConfigurationError(
                f"LoRA: start_from {folder} has another {name!r}, which would be frozen: give the base that it was "
                "trained with, and leave bias and modules_to_save out"
            )
        place.copy_(tensors[name])
    for name, place in places.items():
        if place is not None and not torch.equal(place, tensors[name].to(place)):
            raise ConfigurationError(f"LoRA: start_from {folder} has two values of {name!r}, which is tied here")

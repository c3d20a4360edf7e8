"""LoRA adapters in the format of Hugging Face's peft, made from a checkpoint alone: the base is not needed.

    net.q_proj.lora_A  ->  base_model.model.q_proj.lora_A.weight    (adapter_config.json, adapter_model.safetensors)

PiSSA becomes a plain adapter of rank 2 r on the original weight: B A - B0 A0 = [B, -B0] [A; A0]. QA-LoRA becomes a
plain one beside the dequantised weight: each column of A is repeated for the inputs of its group.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.adapters.diffusers_lora import diffusers_class
from lit_efficient.mechanisms.adapters.experts import LowRankExperts
from lit_efficient.mechanisms.adapters.low_rank import LowRank, kind_of
from lit_efficient.mechanisms.adapters.quantized import is_conv1d


def placement(module: nn.Module) -> dict[str, Any]:
    """Where the adapters of ``module`` stand, as primitives for a checkpoint.

    Returns:
        ``root``: dotted name of the model that was adapted: the transformers or diffusers model inside, else the only
        child that holds adapters. ``kinds``: kind of each adapted layer by its name in that model. ``targets``: what
        peft is to look for there. ``groups``: for QA-LoRA, how many inputs share a column of A, by name. ``experts``:
        which stacked weights have adapters, by the name of the module that holds them; ``transposed``: which of these
        modules hold [E, in, out]. ``config``: that of a transformers model, in JSON.
    """
    names = {name: part for name, part in module.named_modules() if isinstance(part, LowRank)}
    experts = {name: part for name, part in module.named_modules() if isinstance(part, LowRankExperts)}
    root = _root_of(module, [*names, *experts])
    prefix = f"{root}." if root else ""
    parts: dict[str, Any] = {name.removeprefix(prefix): part for name, part in names.items()}
    kinds = {name: "conv1d" if is_conv1d(part) else str(kind_of(part)) for name, part in parts.items()}
    model = module.get_submodule(root)
    everything = [name for name, _ in model.named_modules() if name]
    return {
        "root": root,
        "kinds": kinds,
        "targets": target_modules(kinds, everything),
        "groups": {name: part.group_size for name, part in parts.items() if part.lora_variant == "qalora"},
        "experts": {name.removeprefix(prefix): list(part.lora_names) for name, part in experts.items()},
        "transposed": [name.removeprefix(prefix) for name, part in experts.items() if part.lora_transposed],
        "config": _json_of(getattr(model, "config", None)),
        "auto_mapping": diffusers_class(model),
    }


def _json_of(config: Any) -> str | None:
    """The configuration of a transformers model, without the quantisation that a merged model has no more."""
    if not hasattr(config, "model_type"):
        return None
    entries = json.loads(config.to_json_string(use_diff=False))
    entries.pop("quantization_config", None)
    return json.dumps(entries)


def _root_of(module: nn.Module, names: Iterable[str]) -> str:
    names = list(names)
    for name, part in module.named_modules():
        inside = all(other.startswith(f"{name}.") for other in names) if name else True
        if inside and hasattr(part, "save_pretrained") and hasattr(part, "config"):
            return name
    tops = {name.partition(".")[0] for name in names}
    top = tops.pop() if len(tops) == 1 else ""
    return "" if top in names else top


def target_modules(wanted: Iterable[str], everything: Iterable[str]) -> list[str] | str:
    """The shortest ``target_modules`` with which peft, which compares ends of names, finds exactly ``wanted``."""
    wanted, everything = list(wanted), list(everything)
    for ends in (sorted({name.rpartition(".")[2] for name in wanted}), wanted):
        found = [name for name in everything if any(name == end or name.endswith(f".{end}") for end in ends)]
        if sorted(found) == sorted(wanted):
            return ends
    return "|".join(re.escape(name) for name in wanted)


def to_peft(
    state: Mapping[str, Tensor], where: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What belongs into ``adapter_model.safetensors`` and into ``adapter_config.json`` of a peft adapter.

    Args:
        state: ``state_dict`` of a checkpoint.
        where: What :func:`placement` gave.
        arguments: Those of the technique ``LoRA``.
    """
    if where.get("experts"):
        raise ConfigurationError(
            "adapters of stacked experts are not written in peft's format: export format=merged or safetensors"
        )
    prefix = f"{where['root']}." if where["root"] else ""
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    tensors: dict[str, Tensor] = {}
    for name, kind in where["kinds"].items():
        a, b = own.pop(f"{name}.lora_A"), own.pop(f"{name}.lora_B")
        if f"{name}.lora_A0" in own:
            a = torch.cat((a, own.pop(f"{name}.lora_A0")))
            b = torch.cat((b, -own.pop(f"{name}.lora_B0")), dim=1)
        if name in where["groups"]:
            a = a.repeat_interleave(where["groups"][name], dim=1)
        if kind == "embedding":
            tensors |= {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
        else:
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if f"{name}.lora_magnitude" in own:
            magnitude = own.pop(f"{name}.lora_magnitude")
            shape = (1, -1, 1, 1) if kind == "conv2d" else (-1,)
            tensors[f"{name}.lora_magnitude_vector"] = magnitude.view(shape)
    saved = sorted({key.rpartition(".")[0] for key in own if _is_saved(key, where, arguments)})
    for key, tensor in own.items():
        if key.rpartition(".")[0] in saved:
            tensors[key] = tensor
        elif arguments["bias"] != "none" and key.endswith("bias"):
            owner = key.removesuffix(".bias")
            tensors[f"{owner}.base_layer.bias" if owner in where["kinds"] else key] = tensor
    config = _config(where, arguments, saved)
    return {f"base_model.model.{key}": tensor.contiguous() for key, tensor in tensors.items()}, config


def _is_saved(key: str, where: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    owner = key.rpartition(".")[0]
    full = f"{where['root']}.{owner}".lstrip(".")
    return any(re.fullmatch(rf"(?:.*\.)?(?:{p})(?:\..*)?", full) for p in arguments["modules_to_save"] or ())


def _config(where: Mapping[str, Any], arguments: Mapping[str, Any], saved: list[str]) -> dict[str, Any]:
    doubled = 2 if arguments["variant"] == "pissa" else 1
    return {
        "peft_type": "LORA",
        "r": arguments["rank"] * doubled,
        "lora_alpha": arguments["alpha"] * doubled,
        "lora_dropout": arguments["dropout"],
        "target_modules": where["targets"],
        "bias": arguments["bias"],
        "use_rslora": arguments["variant"] == "rslora",
        "use_dora": arguments["variant"] == "dora",
        "fan_in_fan_out": "conv1d" in where["kinds"].values(),
        "modules_to_save": saved or None,
        "inference_mode": True,
        **({"auto_mapping": where["auto_mapping"]} if where.get("auto_mapping") else {}),
    }

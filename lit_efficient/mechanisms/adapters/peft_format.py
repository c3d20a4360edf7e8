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
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.mechanisms.adapters.base import trained_names
from lit_efficient.mechanisms.adapters.diffusers_lora import diffusers_class
from lit_efficient.mechanisms.adapters.experts import LowRankExperts
from lit_efficient.mechanisms.adapters.low_rank import LowRank, kind_of
from lit_efficient.mechanisms.adapters.quantized import is_conv1d
from lit_efficient.surgery import memory_of, unmixed


def placement(module: nn.Module) -> dict[str, Any]:
    """Where the adapters of ``module`` stand, as primitives for a checkpoint.

    Returns:
        ``root``: dotted name of the module that peft is to adapt: the transformers or diffusers model inside, else the
        only child, if all that trains is in there; else empty, for ``module`` itself. ``kinds``: kind of each adapted
        layer by its name in that model. ``targets``: what peft is to look for there. ``groups``: for QA-LoRA, how many
        inputs share a column of A, by name. ``experts``: which stacked weights have adapters, by the name of the module
        that holds them; ``transposed``: which of these modules hold [E, in, out]. ``statistics``: layers of
        BatchNorm there, whose buffers change while adapters train. ``tied``: names in ``module`` of an adapted weight
        and of another use of it, by pairs. The rest: :func:`described`.
    """
    names = {name: part for name, part in module.named_modules() if isinstance(part, LowRank)}
    experts = {name: part for name, part in module.named_modules() if isinstance(part, LowRankExperts)}
    root = _root_of(module, [*names, *experts, *trained_names(module)])
    prefix = f"{root}." if root else ""
    parts: dict[str, Any] = {name.removeprefix(prefix): part for name, part in names.items()}
    kinds = {name: "conv1d" if is_conv1d(part) else str(kind_of(part)) for name, part in parts.items()}
    model = module.get_submodule(root)
    everything = [name for name, _ in model.named_modules() if name]
    adapted = {id(part.weight): f"{name}.weight" for name, part in names.items()}
    uses = [(adapted.get(id(p)), name) for name, p in module.named_parameters(remove_duplicate=False)]
    return {
        "root": root,
        "kinds": kinds,
        "targets": target_modules(kinds, everything),
        "groups": {name: part.group_size for name, part in parts.items() if part.lora_variant == "qalora"},
        "experts": {name.removeprefix(prefix): list(part.lora_names) for name, part in experts.items()},
        "transposed": [name.removeprefix(prefix) for name, part in experts.items() if part.lora_transposed],
        "statistics": [name for name, part in model.named_modules() if isinstance(part, BatchNorm)],
        "tied": [[first, name] for first, name in uses if first and first != name],
        **described(model),
        "auto_mapping": diffusers_class(model),
    }


def model_placement(module: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """The ``root`` of what peft is to adapt, by the names of what trains there, and what it is: :func:`described`."""
    root = _root_of(module, names)
    return {"root": root, **described(module.get_submodule(root))}


def described(model: nn.Module) -> dict[str, str | None]:
    """Of a transformers model its ``config`` in JSON, ``class``, ``dtype``, and ``base``, where it was loaded from."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return {"config": None, "class": None, "base": None, "dtype": None}
    dtype = str(model.dtype).removeprefix("torch.")
    name = config.name_or_path or None
    return {"config": _json_of(config), "class": unmixed(model).__name__, "base": name, "dtype": dtype}


def _json_of(config: Any) -> str:
    """The configuration of a transformers model, without the quantisation that a merged model has no more."""
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

    ``state`` is the ``state_dict`` of a checkpoint, ``where`` what :func:`placement` gave, ``arguments`` those of
    ``LoRA``.
    """
    if arguments["variant"] == "rounded":
        raise ConfigurationError(
            "export: peft adds what it loads, and variant rounded computes with the sum rounded to int4: use format "
            "safetensors, or merged"
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
    for name, stacks in where.get("experts", {}).items():
        for depth, key in enumerate(reversed(stacks)):  # peft wraps the first parameter first
            a, b = own.pop(f"{name}.lora_A_{key}"), own.pop(f"{name}.lora_B_{key}")
            inner = f"{name}{'.base_layer' * depth}"
            tensors[f"{inner}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{inner}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    saved = {key.rpartition(".")[0] for key in own if _is_saved(key, where, arguments)}
    tied = {memory_of(own[key]) for key in own if key.rpartition(".")[0] in saved}
    # Peft copies each use of a weight, and ties the copies if it is asked to.
    ties = {key.rpartition(".")[0] for key in own if memory_of(own[key]) in tied} - saved
    saved |= ties
    saved |= {name for name in where.get("statistics", ()) if f"{name}.running_mean" in own}
    if "" in saved:
        raise ConfigurationError(
            f"export: peft saves modules, and parameters of {where['root'] or 'the module'!r} itself train: use format "
            "safetensors"
        )
    for key, tensor in own.items():
        owner, _, last = key.rpartition(".")
        if owner in saved:
            tensors[key] = tensor
        elif last == "bias" and owner in where["kinds"] and arguments["bias"] != "none":
            tensors[f"{owner}.base_layer.bias"] = tensor
        elif last == "bias" and arguments["bias"] == "all":
            tensors[key] = tensor
    outer = sorted(name for name in saved if not any(name.startswith(f"{other}.") for other in saved))
    config = _config(where, arguments, outer) | ({"ensure_weight_tying": True} if ties else {})
    return {f"base_model.model.{key}": tensor.contiguous() for key, tensor in tensors.items()}, config


def _is_saved(key: str, where: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    owner = key.rpartition(".")[0]
    full = f"{where['root']}.{owner}".lstrip(".")
    return any(re.fullmatch(rf"(?:.*\.)?(?:{p})(?:\..*)?", full) for p in arguments["modules_to_save"] or ())


def _config(where: Mapping[str, Any], arguments: Mapping[str, Any], saved: list[str]) -> dict[str, Any]:
    doubled = 2 if arguments["variant"] == "pissa" else 1
    targets, parameters = _split(where)
    if parameters and arguments["variant"] == "dora":
        raise ConfigurationError(
            f"export: peft takes {parameters[0]!r} for an expert's, unless it is adapted as a bare parameter, which "
            "has no DoRA there: use format merged"
        )
    return {
        "peft_type": "LORA",
        "r": arguments["rank"] * doubled,
        "lora_alpha": arguments["alpha"] * doubled,
        "lora_dropout": 0.0 if parameters else arguments["dropout"],  # peft drops no input of a bare parameter
        "target_modules": targets,
        "bias": arguments["bias"],
        "use_rslora": arguments["variant"] == "rslora",
        "use_dora": arguments["variant"] == "dora",
        "fan_in_fan_out": "conv1d" in where["kinds"].values(),
        "modules_to_save": saved or None,
        "inference_mode": True,
        **({"auto_mapping": where["auto_mapping"]} if where.get("auto_mapping") else {}),
        **({"target_parameters": parameters} if parameters else {}),
    }


def task_of(where: Mapping[str, Any]) -> str | None:
    """The task type of peft for what :func:`described` says of a model."""
    kind = where.get("class") or ""
    if kind.endswith("ForConditionalGeneration") and json.loads(where["config"])["is_encoder_decoder"]:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if kind.endswith(("ForCausalLM", "LMHeadModel")) else None


def _split(where: Mapping[str, Any]) -> tuple[list[str] | str, list[str]]:
    """Layers to be found by ``target_modules``, and weights by ``target_parameters``.

    In a mixture of experts, peft takes every target that is named as single experts' layers once were for the fused
    experts: dense and shared layers of these names are adapted by their full names, as parameters.
    """
    fused = _fused_names(where.get("config"))
    parameters = [f"{name}.weight" for name in where["kinds"] if name.rpartition(".")[2] in fused]
    stacks = [f"{name}.{key}" for name, keys in where.get("experts", {}).items() for key in keys]
    if not parameters:
        return where["targets"], stacks
    listed = where["kinds"] if isinstance(where["targets"], str) else where["targets"]
    return [target for target in listed if target.rpartition(".")[2] not in fused], parameters + stacks


def _fused_names(config: str | None) -> set[str]:
    """Names of experts' layers that transformers fuses into one parameter when it loads a model."""
    if config is None:
        return set()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    rules = get_checkpoint_conversion_mapping(json.loads(config)["model_type"]) or ()
    sources = [source for rule in rules if getattr(rule, "operations", None) for source in rule.source_patterns]
    return {source.removesuffix(".weight").rpartition(".")[2] for source in sources}

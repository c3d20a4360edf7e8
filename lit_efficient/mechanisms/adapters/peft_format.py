"""Export of LoRA adapters to the format of Hugging Face's peft, from a checkpoint and without the base.

    net.q_proj.lora_A  ->  base_model.model.q_proj.lora_A.weight    (adapter_config.json, adapter_model.safetensors)

PiSSA becomes a plain adapter of rank 2 r on the original weight: B A - B0 A0 = [B, -B0] [A; A0]. QA-LoRA becomes a
plain adapter of the dequantised weight: each column of A is repeated for the inputs of its group.
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
    """Return the positions of the adapters in ``module``, as primitives for a checkpoint.

    Returns:
        A dict with the following keys, and those of :func:`described`:

        - ``root``: dotted name of the model for peft. This is the transformers or diffusers model in ``module``, else
          the only child, if it contains all that trains, else empty for ``module`` itself.
        - ``kinds``: kind of each adapted layer, by its name in the model.
        - ``targets``: ``target_modules`` with which peft finds these layers.
        - ``groups``: number of inputs that share a column of A in QA-LoRA, by name.
        - ``experts``: names of the stacked weights with adapters, by the name of their module.
        - ``transposed``: names of the modules whose stacked weights are [E, in, out].
        - ``statistics``: names of BatchNorm layers, whose buffers change during training.
        - ``tied``: pairs of names in ``module``: an adapted weight, and another name of the same weight.
        - ``auto_mapping``: class of a diffusers model, as peft's configurations name it, or None.
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
    """Return ``root``, the dotted name of the model for peft, and the result of :func:`described` for it.

    Args:
        module: Any module.
        names: Names of the parameters or layers that train.
    """
    root = _root_of(module, names)
    return {"root": root, **described(module.get_submodule(root))}


def described(model: nn.Module) -> dict[str, str | None]:
    """Return the ``config`` in JSON, ``class``, ``dtype`` and ``base`` (the source) of a transformers model.

    The values are None for other models.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return {"config": None, "class": None, "base": None, "dtype": None}
    dtype = str(model.dtype).removeprefix("torch.")
    name = config.name_or_path or None
    return {"config": _json_of(config), "class": unmixed(model).__name__, "base": name, "dtype": dtype}


def _json_of(config: Any) -> str:
    """Return the configuration of a transformers model in JSON, without its quantisation, which merging removes."""
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
    """Return the shortest ``target_modules`` with which peft finds exactly the layers ``wanted``.

    peft compares the entries with the ends of names, and a string with whole names as a regular expression.

    Args:
        wanted: Names of the layers.
        everything: Names of all layers of the model.
    """
    wanted = list(wanted)
    everything = list(everything)
    for ends in (sorted({name.rpartition(".")[2] for name in wanted}), wanted):
        found = [name for name in everything if any(name == end or name.endswith(f".{end}") for end in ends)]
        if sorted(found) == sorted(wanted):
            return ends
    return "|".join(re.escape(name) for name in wanted)


def to_peft(
    state: Mapping[str, Tensor], where: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the contents of ``adapter_model.safetensors`` and ``adapter_config.json`` of a peft adapter.

    Args:
        state: ``state_dict`` of a checkpoint.
        where: Result of :func:`placement`.
        arguments: Arguments of ``LoRA``.

    Raises:
        ConfigurationError: If peft cannot represent what was trained.
    """
    if arguments["variant"] == "rounded":
        raise ConfigurationError(
            "export: variant rounded computes with the sum rounded to int4, and peft's adapters do not round. Use "
            "format safetensors or merged"
        )
    prefix = f"{where['root']}." if where["root"] else ""
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    tensors: dict[str, Tensor] = {}
    for name, kind in where["kinds"].items():
        a = own.pop(f"{name}.lora_A")
        b = own.pop(f"{name}.lora_B")
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
        for depth, key in enumerate(reversed(stacks)):  # peft wraps the first parameter first, so it is the innermost
            a = own.pop(f"{name}.lora_A_{key}")
            b = own.pop(f"{name}.lora_B_{key}")
            inner = f"{name}{'.base_layer' * depth}"
            tensors[f"{inner}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{inner}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    saved = {key.rpartition(".")[0] for key in own if _is_saved(key, where, arguments)}
    tied = {memory_of(own[key]) for key in own if key.rpartition(".")[0] in saved}
    # peft copies a tied weight for each of its layers, and ties the copies with ensure_weight_tying.
    ties = {key.rpartition(".")[0] for key in own if memory_of(own[key]) in tied} - saved
    saved |= ties
    saved |= {name for name in where.get("statistics", ()) if f"{name}.running_mean" in own}
    if "" in saved:
        raise ConfigurationError(
            f"export: parameters of {where['root'] or 'the module'!r} itself train, and peft saves whole submodules "
            "only. Use format safetensors"
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
    config = _config(where, arguments, outer)
    if ties:
        config["ensure_weight_tying"] = True
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
            f"export: peft mistakes {parameters[0]!r} for a layer of an expert unless it is adapted as a parameter, "
            "and peft has no DoRA for parameters. Use format merged"
        )
    config = {
        "peft_type": "LORA",
        "r": arguments["rank"] * doubled,
        "lora_alpha": arguments["alpha"] * doubled,
        "lora_dropout": 0.0 if parameters else arguments["dropout"],  # peft has no dropout for parameters
        "target_modules": targets,
        "bias": arguments["bias"],
        "use_rslora": arguments["variant"] == "rslora",
        "use_dora": arguments["variant"] == "dora",
        "fan_in_fan_out": "conv1d" in where["kinds"].values(),
        "modules_to_save": saved or None,
        "inference_mode": True,
    }
    if where.get("auto_mapping"):
        config["auto_mapping"] = where["auto_mapping"]
    if parameters:
        config["target_parameters"] = parameters
    return config


def task_of(where: Mapping[str, Any]) -> str | None:
    """Return peft's task type for the result of :func:`described`, or None for other models."""
    kind = where.get("class") or ""
    if kind.endswith("ForConditionalGeneration") and json.loads(where["config"])["is_encoder_decoder"]:
        return "SEQ_2_SEQ_LM"
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    return None


def _split(where: Mapping[str, Any]) -> tuple[list[str] | str, list[str]]:
    """Return the values of peft's ``target_modules`` and ``target_parameters``.

    In a mixture of experts, peft applies every target with the name of a single expert's layer to the fused experts.
    Dense and shared layers with such names are therefore adapted as parameters, by their full names.
    """
    fused = _fused_names(where.get("config"))
    parameters = [f"{name}.weight" for name in where["kinds"] if name.rpartition(".")[2] in fused]
    stacks = [f"{name}.{key}" for name, keys in where.get("experts", {}).items() for key in keys]
    if not parameters:
        return where["targets"], stacks
    listed = where["kinds"] if isinstance(where["targets"], str) else where["targets"]
    return [target for target in listed if target.rpartition(".")[2] not in fused], parameters + stacks


def _fused_names(config: str | None) -> set[str]:
    """Return the names of the experts' layers that transformers fuses into one parameter when it loads a model."""
    if config is None:
        return set()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    rules = get_checkpoint_conversion_mapping(json.loads(config)["model_type"]) or ()
    sources = [source for rule in rules if getattr(rule, "operations", None) for source in rule.source_patterns]
    return {source.removesuffix(".weight").rpartition(".")[2] for source in sources}

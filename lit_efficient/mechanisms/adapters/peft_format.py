"""Export of LoRA adapters to the format of Hugging Face's peft, from a checkpoint and without the base.

    net.q_proj.lora_A  ->  base_model.model.q_proj.lora_A.weight    (adapter_config.json, adapter_model.safetensors)

PiSSA becomes a plain adapter of rank 2 r on the original weight: B A - B0 A0 = [B, -B0] [A; A0]. QA-LoRA becomes a
plain adapter of the dequantised weight: each column of A is repeated for the inputs of its group.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import Fields
from lit_efficient.mechanisms.adapters.activated import ACTIVATED
from lit_efficient.mechanisms.adapters.peft_folder import target_modules
from lit_efficient.mechanisms.adapters.starts import FROM_ROUNDING, SUBTRACTED
from lit_efficient.mechanisms.adapters.trained_rows import ROWS
from lit_efficient.surgery import memory_of


def to_peft(
    state: Mapping[str, Tensor], where: Fields, arguments: Fields
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the contents of ``adapter_model.safetensors`` and ``adapter_config.json`` of a peft adapter.

    Args:
        state: ``state_dict`` of a checkpoint.
        where: Result of :func:`~lit_efficient.mechanisms.adapters.peft_folder.placement`.
        arguments: Arguments of ``LoRA``.

    Raises:
        ConfigurationError: If peft cannot represent what was trained.
    """
    if arguments["variant"] == "rounded":
        raise ConfigurationError(
            "export: variant rounded computes with the sum rounded to int4, and peft's adapters do not round. Use "
            "format safetensors or merged"
        )
    if arguments["variant"] == FROM_ROUNDING and (arguments["start_rounds"] or 1) > 1:
        raise ConfigurationError(
            f"export: start_rounds={arguments['start_rounds']} of LoftQ changes the quantised weights, too, and an "
            "adapter of peft has none. Use format merged"
        )
    if where["padded"]:
        raise ConfigurationError(
            f"export: the convolution {where['padded'][0]!r} has another padding_mode than zeros, and peft's adapters "
            "pad with zeros. Use format safetensors or merged"
        )
    prefix = f"{where['root']}." if where["root"] else ""
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, kind in where["kinds"].items():
        a = own.pop(f"{name}.lora_A")
        ranks[name] = len(a)
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
    for name in where["rows"]:
        tensors[f"{name}.token_adapter.trainable_tokens_delta"] = own.pop(f"{name}.{ROWS}")
    for name in where["row_ties"]:
        del own[f"{name}.{ROWS}"]
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
    whole = {_saved_module(name, where, arguments) for name in saved}
    outer = sorted(name for name in whole if not any(name.startswith(f"{other}.") for other in whole))
    config = _config(where, arguments, outer, ranks)
    if ties:
        config["ensure_weight_tying"] = True
    return {f"base_model.model.{key}": tensor.contiguous() for key, tensor in tensors.items()}, config


def _is_saved(key: str, where: Mapping[str, object], arguments: Fields) -> bool:
    owner = key.rpartition(".")[0]
    full = f"{where['root']}.{owner}".lstrip(".")
    return any(re.fullmatch(rf"(?:.*\.)?(?:{p})(?:\..*)?", full) for p in arguments["modules_to_save"] or ())


def _saved_module(name: str, where: Mapping[str, object], arguments: Fields) -> str:
    """Return the outermost module around a saved one that is saved as a whole.

    peft wraps some heads as a whole, whatever the configuration says.
    """
    parts = name.split(".")
    for count in range(1, len(parts)):
        outer = ".".join(parts[:count])
        full = f"{where['root']}.{outer}".lstrip(".")
        if any(re.fullmatch(rf"(?:.*\.)?(?:{p})", full) for p in arguments["modules_to_save"] or ()):
            return outer
    return name


def _config(where: Fields, arguments: Fields, saved: list[str], ranks: Mapping[str, int]) -> dict[str, Any]:
    doubled = 2 if arguments["variant"] in SUBTRACTED else 1
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
    if arguments["variant"] == ACTIVATED:
        config["alora_invocation_tokens"] = arguments["invocation_tokens"]
    if where["rows"]:
        config["trainable_token_indices"] = where["rows"]
    if where.get("auto_mapping"):
        config["auto_mapping"] = where["auto_mapping"]
    for key, usual, own in (
        ("rank_pattern", arguments["rank"], ranks),
        ("alpha_pattern", arguments["alpha"], where.get("alphas", {})),
    ):
        found = _patterns(own, usual, doubled)
        if found and parameters:
            raise ConfigurationError(
                f"export: peft adapts {parameters[0]!r} as a parameter, and its config has no {key} for parameters. "
                "Use format merged"
            )
        if found:
            config[key] = found
    if parameters:
        config["target_parameters"] = parameters
    return config


def _patterns(own: Mapping[str, float], usual: float, times: int) -> dict[str, float]:
    """Return peft's patterns of the layers with another value than usual, and ``times`` this value."""
    found: dict[str, float] = {}
    for value in sorted({*own.values()} - {usual}):
        ends = target_modules([name for name, one in own.items() if one == value], own)
        if isinstance(ends, str):  # names that are ends of other names
            ends = [f"^{name}" for name, one in own.items() if one == value]
        found |= dict.fromkeys(ends, value * times)
    return found


def task_of(where: Fields) -> str | None:
    """Return peft's task type for a model, or None.

    Args:
        where: Result of :func:`~lit_efficient.mechanisms.adapters.peft_folder.described`.
    """
    kind = where.get("class") or ""
    if kind.endswith("ForConditionalGeneration"):  # of encoder and decoder, or of images and text
        if json.loads(where["config"]).get("is_encoder_decoder"):
            return "SEQ_2_SEQ_LM"
        return "CAUSAL_LM"
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    if kind.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if kind.endswith("ForTokenClassification"):
        return "TOKEN_CLS"
    if kind.endswith("Model"):
        return "FEATURE_EXTRACTION"
    return None


def _split(where: Fields) -> tuple[list[str] | str, list[str]]:
    """Return the values of peft's ``target_modules`` and ``target_parameters``.

    In a mixture of experts, peft applies every target with the name of a single expert's layer to the fused experts.
    Dense and shared layers with such names are therefore adapted as parameters, by their full names.
    """
    fused = _fused_names(where.get("config"))
    parameters = [f"{name}.weight" for name in where["kinds"] if name.rpartition(".")[2] in fused]
    stacks = [f"{name}.{key}" for name, keys in where.get("experts", {}).items() for key in keys]
    if not parameters:
        return where["targets"], stacks
    if isinstance(where["targets"], str):
        listed = where["kinds"]
    else:
        listed = where["targets"]
    return [target for target in listed if target.rpartition(".")[2] not in fused], parameters + stacks


def _fused_names(config: str | None) -> set[str]:
    """Return the names of the experts' layers that transformers fuses into one parameter when it loads a model."""
    if config is None:
        return set()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    rules = get_checkpoint_conversion_mapping(json.loads(config)["model_type"]) or ()
    sources = [source for rule in rules if getattr(rule, "operations", None) for source in rule.source_patterns]
    return {source.removesuffix(".weight").rpartition(".")[2] for source in sources}

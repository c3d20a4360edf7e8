"""Export of IA3's factors, prefixes and prompts to the format of Hugging Face's peft, from a checkpoint without a base.

    net.k_proj.ia3    ->  base_model.model.k_proj.ia3_l    [out, 1], before a projection down [1, in]
    prefix_keys ...   ->  prompt_embeddings                [n, layers * (keys, values) * heads * head_dim]

Factors can also be merged into weights, W <- diag(l) W or W diag(l). Prefixes cannot.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.application.recorded import arguments_behind
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.checkpoints import Fields
from lit_efficient.mechanisms.adapters.ia3 import IA3Scaled, whole_factors
from lit_efficient.mechanisms.adapters.low_rank import kind_of
from lit_efficient.mechanisms.adapters.peft_folder import described, model_root
from lit_efficient.mechanisms.adapters.prefix import CHILD, prefix_of
from lit_efficient.mechanisms.adapters.prompt import PROMPT
from lit_efficient.mechanisms.adapters.quantized import is_conv1d


def ia3_placement(module: nn.Module) -> dict[str, Any]:
    """Return the positions of the factors in ``module``, as primitives for a checkpoint.

    Returns:
        A dict with the following keys, and those of :func:`~lit_efficient.mechanisms.adapters.peft_folder.described`:

        - ``root``: dotted name of the scaled model.
        - ``layers``: for each layer, by its name in the model, its ``kind``, the scaled ``side``, and the index of the
          ``first`` scaled output.
        - ``targets`` and ``feedforward``: ``target_modules`` and ``feedforward_modules`` of peft.
    """
    scaled = {name: part for name, part in module.named_modules() if isinstance(part, IA3Scaled)}
    root = model_root(module, scaled)
    prefix = f"{root}." if root else ""
    layers = {
        name.removeprefix(prefix): {
            "kind": "conv1d" if is_conv1d(part) else str(kind_of(part)),  # type: ignore[arg-type]
            "side": part.ia3_side,
            "first": part.ia3_first,
        }
        for name, part in scaled.items()
    }
    everything = [name for name, _ in module.get_submodule(root).named_modules() if name]
    inputs = [name for name, layer in layers.items() if layer["side"] == "input"]
    targets, feedforward = ia3_patterns(layers, inputs, everything)
    found = {"root": root, "layers": layers, "targets": targets, "feedforward": feedforward}
    return found | described(module.get_submodule(root))


def ia3_patterns(
    scaled: Iterable[str], inputs: Iterable[str], everything: Iterable[str]
) -> tuple[list[str] | str, list[str] | str]:
    """Return the shortest ``target_modules`` and ``feedforward_modules`` with which peft finds exactly these layers.

    peft compares the former with the ends of names after a dot, and the latter with the ends of the names that it has
    found.

    Args:
        scaled: Names of all scaled layers.
        inputs: Names of the layers whose input is scaled.
        everything: Names of all layers of the model.
    """
    scaled = list(scaled)
    inputs = list(inputs)
    everything = list(everything)
    for parts in (1, 2):
        ends = [*dict.fromkeys(_end(name, parts) for name in scaled)]
        downs = [*dict.fromkeys(_end(name, parts) for name in inputs)]
        found = [name for name in everything if any(f".{name}".endswith(f".{end}") for end in ends)]
        down = [name for name in found if any(name.endswith(end) for end in downs)]
        if sorted(found) == sorted(scaled) and sorted(down) == sorted(inputs):
            return ends, downs
    return _any_of(scaled), _any_of(inputs)


def _any_of(names: Iterable[str]) -> str:
    """Return a regular expression for whole names. Without names it matches nothing."""
    return "|".join(re.escape(name) for name in names) or "(?!)"


def _end(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def vectors_to_peft(checkpoint: Fields) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and configuration of a peft adapter for a checkpoint of IA3, PrefixTuning or PromptTuning.

    Return None for other checkpoints.

    Raises:
        ConfigurationError: If peft cannot represent what was trained.
    """
    kept = checkpoint.get("lit_efficient", {})
    state = checkpoint["state_dict"]
    if "ia3" in kept:
        return _ia3_to_peft(state, kept["ia3"])
    arguments = arguments_behind(checkpoint, "prefix")
    if arguments is None:
        return None
    if kept["prefix"].get("prompt"):
        return _prompt_to_peft(state, kept["prefix"], arguments)
    return _prefix_to_peft(state, kept["prefix"], arguments)


def _ia3_to_peft(state: Mapping[str, Tensor], where: Fields) -> tuple[dict[str, Tensor], dict[str, Any]]:
    prefix = _prefix(where)
    tensors = {}
    for name, layer in where["layers"].items():
        factors = whole_factors(state[f"{prefix}{name}.ia3"], layer["first"])
        shape = (1, -1) if layer["side"] == "input" else (-1, 1)
        tensors[f"base_model.model.{name}.ia3_l"] = factors.reshape(shape).contiguous()
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    # The statistics of BatchNorm change during training, and peft saves whole modules.
    norms = [key.removesuffix(".running_mean") for key in own if key.endswith(".running_mean")]
    for key, tensor in own.items():
        if key.rpartition(".")[0] in norms:
            tensors[f"base_model.model.{key}"] = tensor.contiguous()
    config = {
        "peft_type": "IA3",
        "target_modules": where["targets"],
        "feedforward_modules": where["feedforward"],
        "fan_in_fan_out": any(layer["kind"] == "conv1d" for layer in where["layers"].values()),
        "inference_mode": True,
    }
    if norms:
        config["modules_to_save"] = sorted(norms)
    return tensors, config


def _prefix(where: Mapping[str, object]) -> str:
    """Return the prefix of the scaled model's names in a ``state_dict``."""
    if where.get("root"):
        return f"{where['root']}."
    return ""


def _prompt_to_peft(
    state: Mapping[str, Tensor], where: Fields, arguments: Fields
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check_place(where, arguments)
    embedded = state[f"{where['decoder']}.{PROMPT}.prompt_embeddings".lstrip(".")]
    return {"prompt_embeddings": embedded.contiguous()}, {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": embedded.shape[0],
        "num_layers": where["layers"],
        "num_attention_heads": where["heads"],
        "token_dim": embedded.shape[1],
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
        "inference_mode": True,
    }


def _check_place(where: Mapping[str, object], arguments: Mapping[str, object]) -> None:
    what = None
    if arguments.get("modules_to_save"):
        what = "modules_to_save together with a prefix"
    elif not where["transformers"]:
        what = "a prefix of lit_efficient.GPT"
    if what is not None:
        raise ConfigurationError(
            f"export: peft cannot represent {what}, only a prefix of a causal language model of transformers. Use "
            "format safetensors"
        )


def _prefix_to_peft(
    state: Mapping[str, Tensor], where: Fields, arguments: Fields
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check_place(where, arguments)
    prefix = f"{where['decoder']}.{CHILD}.".lstrip(".")
    keys, values = prefix_of({key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)})
    layers, heads, length, width = keys.shape
    stacked = torch.stack((keys, values), dim=1)  # (layers, 2, heads, n, head_dim)
    return {"prompt_embeddings": stacked.permute(3, 0, 1, 2, 4).reshape(length, -1).contiguous()}, {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": length,
        "num_layers": layers,
        "num_attention_heads": heads,  # peft expects the number of key heads
        "token_dim": heads * width,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "inference_mode": True,
    }


def scaled_names(checkpoint: Fields) -> dict[str, dict[str, Any]]:
    """Return the layers that IA3 has scaled, by their names in a checkpoint's ``state_dict``."""
    where = checkpoint.get("lit_efficient", {}).get("ia3", {"layers": {}})
    prefix = _prefix(where)
    return {f"{prefix}{name}": layer for name, layer in where["layers"].items()}


def fold_vectors(state: dict[str, Tensor], checkpoint: Fields) -> dict[str, Tensor]:
    """Multiply float weights and biases by a checkpoint's factors of IA3, in place, and return ``state``.

    Args:
        state: Weights and factors by name.
        checkpoint: The checkpoint.

    Raises:
        CheckpointError: If the weight of a scaled layer is missing.
    """
    for name, layer in scaled_names(checkpoint).items():
        weight = state.get(f"{name}.weight")
        bias = state.get(f"{name}.bias")
        if weight is None:
            raise CheckpointError(
                f"export: the weight '{name}.weight', which IA3 scales, is not in the checkpoint. Name the base with "
                "which it was trained"
            )
        factors = whole_factors(state.pop(f"{name}.ia3"), layer["first"])
        per_row = (layer["kind"] == "linear") == (layer["side"] == "output")
        scales = factors[:, None] if per_row else factors
        state[f"{name}.weight"] = (weight * scales).to(weight.dtype)
        if layer["side"] == "output" and bias is not None:
            state[f"{name}.bias"] = (bias * factors).to(bias.dtype)
    return state


def refuse_prefix(checkpoint: Fields) -> None:
    """Raise :class:`ConfigurationError` if a checkpoint has a prefix, which cannot be merged into weights."""
    if "prefix" in checkpoint.get("lit_efficient", {}):
        raise ConfigurationError("export: a prefix cannot be merged into weights. Use format peft")

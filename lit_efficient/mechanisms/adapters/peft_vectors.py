"""IA3's factors and prefixes in the format of Hugging Face's peft, made from a checkpoint alone: no base is needed.

    net.k_proj.ia3    ->  base_model.model.k_proj.ia3_l    [out, 1], before a projection down [1, in]
    prefix_keys ...   ->  prompt_embeddings                [n, layers * (keys, values) * heads * head_dim]

Factors also fold into weights, W <- diag(l) W or W diag(l); a prefix does not.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.application.recorded import arguments_behind
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.mechanisms.adapters.ia3 import IA3Scaled, whole_factors
from lit_efficient.mechanisms.adapters.low_rank import kind_of
from lit_efficient.mechanisms.adapters.peft_format import _root_of, described
from lit_efficient.mechanisms.adapters.prefix import CHILD, prefix_of
from lit_efficient.mechanisms.adapters.prompt import PROMPT
from lit_efficient.mechanisms.adapters.quantized import is_conv1d


def ia3_placement(module: nn.Module) -> dict[str, Any]:
    """Where the factors of ``module`` stand, as primitives for a checkpoint.

    Returns:
        ``root``: dotted name of the model that was scaled. ``layers``: by the layer's name in that model, its ``kind``,
        its scaled ``side`` and the ``first`` output that is scaled. ``targets`` and ``feedforward``: what peft is to
        look for there. The rest: :func:`~lit_efficient.mechanisms.adapters.peft_format.described`.
    """
    scaled = {name: part for name, part in module.named_modules() if isinstance(part, IA3Scaled)}
    root = _root_of(module, scaled)
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
    """The shortest ``target_modules`` and ``feedforward_modules`` with which peft finds exactly these layers.

    It compares the former with ends of names at a dot, the latter with ends of the names that it has found.
    """
    scaled, inputs = list(scaled), list(inputs)
    everything = list(everything)
    for parts in (1, 2):
        ends, downs = ([*dict.fromkeys(_end(name, parts) for name in names)] for names in (scaled, inputs))
        found = [name for name in everything if any(f".{name}".endswith(f".{end}") for end in ends)]
        down = [name for name in found if any(name.endswith(end) for end in downs)]
        if sorted(found) == sorted(scaled) and sorted(down) == sorted(inputs):
            return ends, downs
    either = ("|".join(re.escape(name) for name in names) or "(?!)" for names in (scaled, inputs))
    return next(either), next(either)


def _end(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def vectors_to_peft(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and configuration of a peft adapter, where a checkpoint is one of IA3 or PrefixTuning; else ``None``.

    Raises:
        ConfigurationError: If peft has no place for what was trained.
    """
    kept, state = checkpoint.get("lit_efficient", {}), checkpoint["state_dict"]
    if "ia3" in kept:
        return _ia3_to_peft(state, kept["ia3"])
    arguments = arguments_behind(checkpoint, "prefix")
    if arguments is None:
        return None
    to_peft = _prompt_to_peft if kept["prefix"].get("prompt") else _prefix_to_peft
    return to_peft(state, kept["prefix"], arguments)


def _ia3_to_peft(state: Mapping[str, Tensor], where: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    prefix = f"{where['root']}." if where["root"] else ""
    tensors = {}
    for name, layer in where["layers"].items():
        factors = whole_factors(state[f"{prefix}{name}.ia3"], layer["first"])
        shape = (1, -1) if layer["side"] == "input" else (-1, 1)
        tensors[f"base_model.model.{name}.ia3_l"] = factors.reshape(shape).contiguous()
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    norms = [key.removesuffix(".running_mean") for key in own if key.endswith(".running_mean")]  # they change meanwhile
    for key, tensor in own.items():
        if key.rpartition(".")[0] in norms:
            tensors[f"base_model.model.{key}"] = tensor.contiguous()
    return tensors, {
        **({"modules_to_save": sorted(norms)} if norms else {}),
        "peft_type": "IA3",
        "target_modules": where["targets"],
        "feedforward_modules": where["feedforward"],
        "fan_in_fan_out": any(layer["kind"] == "conv1d" for layer in where["layers"].values()),
        "inference_mode": True,
    }


def _prompt_to_peft(
    state: Mapping[str, Tensor], where: Mapping[str, Any], arguments: Mapping[str, Any]
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


def _check_place(where: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    if not where["transformers"] or arguments.get("modules_to_save"):
        what = (
            "modules_to_save beside a prefix" if arguments.get("modules_to_save") else "a prefix of lit_efficient.GPT"
        )
        raise ConfigurationError(
            f"export: peft has no place for {what}, only for the prefix of a causal language model of transformers"
        )


def _prefix_to_peft(
    state: Mapping[str, Tensor], where: Mapping[str, Any], arguments: Mapping[str, Any]
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
        "num_attention_heads": heads,  # peft means those of the keys
        "token_dim": heads * width,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "inference_mode": True,
    }


def scaled_names(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The layers that IA3 has scaled, by their names in a checkpoint's ``state_dict``."""
    where = checkpoint.get("lit_efficient", {}).get("ia3", {"layers": {}})
    prefix = f"{where['root']}." if where.get("root") else ""
    return {f"{prefix}{name}": layer for name, layer in where["layers"].items()}


def fold_vectors(state: dict[str, Tensor], checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Multiply a checkpoint's factors of IA3 into the weights (as floats) and biases of ``state``, in place, and return
    it.

    Raises:
        CheckpointError: If the weight of a scaled layer is not there.
    """
    for name, layer in scaled_names(checkpoint).items():
        weight, bias = (state.get(f"{name}.{last}") for last in ("weight", "bias"))
        if weight is None:
            raise CheckpointError(
                f"export: the weight '{name}.weight', which IA3 scales, is not in the checkpoint: name the base it "
                "was trained with"
            )
        factors = whole_factors(state.pop(f"{name}.ia3"), layer["first"])
        per_row = (layer["kind"] == "linear") == (layer["side"] == "output")
        state[f"{name}.weight"] = (weight * (factors[:, None] if per_row else factors)).to(weight.dtype)
        if layer["side"] == "output" and bias is not None:
            state[f"{name}.bias"] = (bias * factors).to(bias.dtype)
    return state


def refuse_prefix(checkpoint: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` if a checkpoint has a prefix, which no weight can hold."""
    if "prefix" in checkpoint.get("lit_efficient", {}):
        raise ConfigurationError("export: a prefix cannot be merged into weights; use format peft")

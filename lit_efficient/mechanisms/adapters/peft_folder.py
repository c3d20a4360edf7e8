"""LoRA adapters in folders of peft: reading them, and the description of a module from which an export writes them.

    adapter_config.json + adapter_model.safetensors  ->  rank, alpha, targets, ...  ->  lora_A, lora_B, modules_to_save

The adapted layers are those with tensors in the file. Options that LoRA does not support raise an error. peft nests the
adapters of a module's stacked parameters in the order of the module, and stores A as [E r, in] and B as [out, r E].
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors
from lit_efficient.internals.hugging_face import generation_json
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.mechanisms.adapters.activated import ACTIVATED
from lit_efficient.mechanisms.adapters.base import trained_names
from lit_efficient.mechanisms.adapters.experts import LowRankExperts
from lit_efficient.mechanisms.adapters.low_rank import LowRank, kind_of
from lit_efficient.mechanisms.adapters.quantized import is_conv1d
from lit_efficient.mechanisms.adapters.trained_rows import ROWS, TrainedRows
from lit_efficient.surgery import unmixed

_OUTER = "base_model.model."
_OURS = {  # ends of peft's tensor names, and the corresponding names of this package
    ".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_A", ".lora_embedding_B": "lora_B",
    ".token_adapter.trainable_tokens_delta": ROWS,
    ".lora_magnitude_vector": "lora_magnitude", ".lora_magnitude_vector.weight": "lora_magnitude",
}  # fmt: skip
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that do not change the base
_NESTED = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_([AB])\.weight")
_UNSUPPORTED = ("use_qalora", "arrow_config", "layer_replication")


def read_adapter(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder that peft has saved, or a LoRA of an image program, as a folder or a file.

    Returns:
        Arguments of LoRA, and the tensors by this package's names in the adapted model. The layers of a file of an
        image program are known only with the network (:func:`adapter_in`): ``targets`` and the tensors are missing.

    Raises:
        CheckpointError: If a file is missing or damaged.
        ConfigurationError: If the adapter is not LoRA, or uses an unsupported option.
    """
    place = Path(folder)
    check_sums(place)
    from lit_efficient.mechanisms.adapters.lora_files import pipeline_file, read_lora_file  # only these files need it

    file = pipeline_file(place)
    if file is not None:
        return read_lora_file(file).fields(), {}
    try:
        config = json.loads((place / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place / 'adapter_config.json'} cannot be read: {error}") from error
    found = load_tensors(place / "adapter_model.safetensors")
    if config.get("peft_type") != "LORA":
        raise ConfigurationError(
            f"LoRA: start_from={folder} has peft_type {config.get('peft_type')}, not LORA. Use PeftAdapter for others"
        )
    stacks = _stacks(config, found)
    tensors = dict(_named(name, tensor, stacks) for name, tensor in found.items())
    layers = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    ranks = {name: tensors[f"{name}.lora_A"].shape[0] for name in layers}
    other = [f"{key}={config[key]!r}" for key in _UNSUPPORTED if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        other.append(f"init_lora_weights={config['init_lora_weights']!r}")
    patterns: dict[str, dict[str, float]] = {}
    for name, rank in sorted(ranks.items(), key=lambda item: -len(item[0])):  # a name may be the end of a longer one
        configured = by_pattern(config, "rank_pattern", name, config["r"])
        if rank != configured:
            other.append(f"rank {rank} instead of {configured} in {name!r}")
            break
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            alpha = by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
            patterns[re.escape(name)] = {"rank": rank, "alpha": alpha}
    stacked = [f"{name}.{key}" for name, keys in stacks.items() for key in keys]
    for key, usual in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        own = [name for name in stacked if by_pattern(config, key, name, config[usual]) != config[usual]]
        other += [f"another {usual} for the stacked weights {name!r}" for name in own]
    if other:
        raise ConfigurationError(
            f"LoRA: start_from={folder} has {other[0]}, which LoRA does not support. Merge the adapter into its base"
        )
    variant = "lora"
    if config.get("use_dora"):
        variant = "dora"
    elif config.get("use_rslora"):
        variant = "rslora"
    if config.get("alora_invocation_tokens"):
        if variant != "lora":
            raise ConfigurationError(f"LoRA: start_from={folder} is aLoRA with {variant}, which LoRA does not support")
        variant = ACTIVATED
    biases = {name for name in tensors if name.endswith(".bias") and config.get("bias", "none") != "none"}
    by_rows = {name.removesuffix(f".{ROWS}") for name in tensors if name.endswith(f".{ROWS}")}
    whole = {name.rpartition(".")[0] for name in tensors if ".lora_" not in name and name not in biases}
    whole -= {*layers, *by_rows}
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": [re.escape(name) for name in (*layers, *stacked)],
        "dropout": config.get("lora_dropout", 0.0),
        "variant": variant,
        "patterns": patterns or None,
        "invocation_tokens": config.get("alora_invocation_tokens"),
        "bias": config.get("bias", "none"),
        "modules_to_save": [re.escape(name) for name in sorted(whole)] or None,
        "trainable_token_indices": _row_ids(config.get("trainable_token_indices"), folder),
    }, tensors


def _stacks(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the stacked parameters with adapters in a file of peft, by the name of their module.

    peft also adapts the weights of single layers as parameters. Their factors have r rows instead of r for each expert.
    """
    targets = [target.rpartition(".") for target in config.get("target_parameters") or ()]
    stacks: dict[str, list[str]] = {}
    for name, tensor in found.items():
        match = _NESTED.fullmatch(name.removeprefix(_OUTER))
        if match is None or match[3] != "A" or len(tensor) == by_pattern(config, "rank_pattern", match[1], config["r"]):
            continue
        keys = [key for owner, _, key in targets if f".{match[1]}".endswith(f".{owner}" if owner else "")]
        if keys:
            stacks[match[1]] = keys
    return stacks


def by_pattern(config: Mapping[str, Any], key: str, name: str, default: float) -> float:
    """Return the value of the first pattern of peft that matches the end of a layer's name."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value) if key == "alpha_pattern" else int(value)
    return default


def adapter_in(folder: str, module: nn.Module, rank: int, scale: float) -> tuple[list[str], dict[str, Tensor]]:
    """Return the patterns of the layers of an adapter, and its tensors by this package's names in a module.

    Args:
        folder: Folder or file, as in :func:`read_adapter`.
        module: The module.
        rank: Rank of the adapters that the tensors are for.
        scale: Factor of B A of these adapters.

    Raises:
        ConfigurationError: If an image program's file belongs to another network.
    """
    from lit_efficient.mechanisms.adapters.lora_files import pipeline_file, placed_factors, read_lora_file

    file = pipeline_file(Path(folder))
    if file is None:
        fields, tensors = read_adapter(folder)
        return fields["targets"], tensors
    tensors = placed_factors(read_lora_file(file), module, rank, scale)
    layers = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    return [re.escape(name) for name in layers], tensors


def _row_ids(given: list[int] | dict[str, list[int]] | None, folder: str) -> list[int] | None:
    """Return the ids of the trained rows, which peft stores once, or for each layer."""
    if not isinstance(given, dict):
        return given
    lists = list(given.values())
    if any(one != lists[0] for one in lists):
        raise ConfigurationError(
            f"LoRA: start_from={folder} trains different rows in different layers, which LoRA does not support. Merge "
            "the adapter into its base"
        )
    return lists[0]


def _named(name: str, tensor: Tensor, stacks: Mapping[str, Sequence[str]]) -> tuple[str, Tensor]:
    """Return this package's name and shape of a tensor of peft.

    The factors of stacked weights keep their shape. If a module has several, their depth stands for the name of the
    parameter, because only the module knows the order.
    """
    name = name.removeprefix(_OUTER)
    nested = _NESTED.fullmatch(name)
    if nested is not None and nested[1] in stacks:
        keys = stacks[nested[1]]
        last = keys[0] if len(keys) == 1 else nested[2].count(".")
        return f"{nested[1]}.lora_{nested[3]}_{last}", tensor
    name = name.replace(".base_layer.", ".")
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
    tensors = _by_expert(module, tensors)
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


def _by_expert(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors among which those of stacked weights have the names and shapes of the module's parameters."""
    parts = {f".{name}": part for name, part in module.named_modules() if isinstance(part, LowRankExperts)}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        part = next((part for at, part in parts.items() if at.endswith(f".{layer}")), None)
        if part is None or not last.startswith(("lora_A_", "lora_B_")):
            found[name] = tensor
            continue
        factor = last[:6]
        key = last[7:]
        if key.isdigit():  # the depth: peft wraps the first parameter first, so it is the innermost
            key = dict(enumerate(reversed(part.lora_names))).get(int(key), key)
        own = f"{factor}_{key}"
        found[f"{layer}.{own}"] = _stacked_factor(tensor, getattr(part, own, tensor), factor)
    return found


def _stacked_factor(tensor: Tensor, place: Tensor, factor: str) -> Tensor:
    """Return a factor of peft in the shape of ``place``, or unchanged if it does not fit."""
    if factor == "lora_A" and tensor.shape == place.flatten(0, 1).shape:
        return tensor.view(place.shape)
    if factor == "lora_B" and place.ndim == 3:
        by_rank = place.permute(1, 2, 0)  # [out, r, E]
        if tensor.shape == by_rank.flatten(1).shape:
            return tensor.view(by_rank.shape).permute(2, 0, 1)
    return tensor


def placement(module: nn.Module) -> dict[str, Any]:
    """Return the positions of the adapters in ``module``, as primitives for a checkpoint.

    Networks that only training needs (``training_only`` of the module, their names) are left out.

    Returns:
        A dict with the following keys, and those of :func:`described`:

        - ``root``: dotted name of the model for peft. This is the transformers or diffusers model in ``module``, else
          the only child, if it contains all that trains, else empty for ``module`` itself.
        - ``kinds``: kind of each adapted layer, by its name in the model; ``alphas``: its alpha.
        - ``targets``: ``target_modules`` with which peft finds these layers.
        - ``padded``: names of adapted convolutions that pad with other values than zeros.
        - ``groups``: number of inputs that share a column of A in QA-LoRA, by name.
        - ``experts``: names of the stacked weights with adapters, by the name of their module.
        - ``transposed``: names of the modules whose stacked weights are [E, in, out].
        - ``statistics``: names of BatchNorm layers, whose buffers change during training.
        - ``tied``: pairs of names in ``module``: an adapted weight, and another name of the same weight.
        - ``rows``: ids of the trained rows by the name of each layer, and ``row_ties``: for further layers with the
          same rows, the name of the first one.
        - ``networks``: for each model of diffusers or transformers with adapters its ``name`` in ``module``,
          ``library``, ``class``, ``config`` in JSON, and ``targets``, as above.
        - ``auto_mapping``: class of a diffusers model, as peft's configurations name it, or None.
    """
    apart = tuple(f"{name}." for name in getattr(module, "training_only", ()))
    kept = {name: part for name, part in module.named_modules() if not name.startswith(apart)}
    names = {name: part for name, part in kept.items() if isinstance(part, LowRank)}
    experts = {name: part for name, part in kept.items() if isinstance(part, LowRankExperts)}
    trained = [name for name in trained_names(module) if not name.startswith(apart)]
    root = model_root(module, [*names, *experts, *trained])
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
        "alphas": {name: part.lora_alpha for name, part in parts.items()},
        "targets": target_modules(kinds, everything),
        "padded": [name for name, part in parts.items() if getattr(part, "padding_mode", "zeros") != "zeros"],
        "groups": {name: part.group_size for name, part in parts.items() if part.lora_variant == "qalora"},
        "experts": {name.removeprefix(prefix): list(part.lora_names) for name, part in experts.items()},
        "transposed": [name.removeprefix(prefix) for name, part in experts.items() if part.lora_transposed],
        "statistics": [name for name, part in model.named_modules() if isinstance(part, BatchNorm)],
        "tied": [[first, name] for first, name in uses if first and first != name],
        **_placed_rows(model),
        "networks": _networks(module, names),
        **described(model),
        "auto_mapping": diffusers_class(model),
    }


def _networks(module: nn.Module, adapted: Iterable[str]) -> list[dict[str, Any]]:
    """Return ``networks`` of :func:`placement`, which are not inside each other."""
    found: list[dict[str, object]] = []
    part: Any
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        inside = [other.removeprefix(prefix) for other in adapted if other.startswith(prefix)]
        above = any(not one["name"] or name.startswith(f"{one['name']}.") for one in found)
        if above or not inside or not (hasattr(part, "save_pretrained") and hasattr(part, "config")):
            continue
        if diffusers_class(part):
            library = "diffusers"
            config = part.to_json_string()
        elif hasattr(part.config, "model_type"):
            library = "transformers"
            config = _json_of(part.config)
        else:
            continue
        targets = target_modules(inside, [other for other, _ in part.named_modules() if other])
        kind = unmixed(part).__name__
        found.append({"name": name, "library": library, "class": kind, "config": config, "targets": targets})
    return found


def _placed_rows(model: nn.Module) -> dict[str, Any]:
    """Return ``rows`` and ``row_ties`` of :func:`placement`."""
    rows: dict[str, list[int]] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, part in model.named_modules():
        if isinstance(part, TrainedRows):
            known = first.setdefault(id(part.trained_rows), name)
            if known == name:
                rows[name] = list(part.row_ids)
            else:
                ties[name] = known
    return {"rows": rows, "row_ties": ties}


def model_placement(module: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """Return ``root``, the dotted name of the model for peft, and the result of :func:`described` for it.

    Args:
        module: Any module.
        names: Names of the parameters or layers that train.
    """
    root = model_root(module, names)
    return {"root": root, **described(module.get_submodule(root))}


def described(model: nn.Module) -> dict[str, str | None]:
    """Return the ``config`` and the settings of ``generation`` in JSON, and ``class``, ``dtype`` and ``base`` (the
    source) of a transformers model.

    The values are None for other models.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return dict.fromkeys(("config", "class", "base", "dtype", "generation"))
    dtype = str(model.dtype).removeprefix("torch.")
    name = config.name_or_path or None
    return {
        "config": _json_of(config),
        "class": unmixed(model).__name__,
        "base": name,
        "dtype": dtype,
        "generation": generation_json(model),
    }


def _json_of(config: Any) -> str:
    """Return the configuration of a transformers model in JSON, without its quantisation, which merging removes."""
    entries = json.loads(config.to_json_string(use_diff=False))
    entries.pop("quantization_config", None)
    return json.dumps(entries)


def model_root(module: nn.Module, names: Iterable[str]) -> str:
    """Return the dotted name of the model for peft that contains everything in ``names``.

    This is a model of transformers or diffusers, else the only child that contains all names, else the module itself
    (an empty name).
    """
    names = list(names)
    for name, part in module.named_modules():
        inside = not name or all(other.startswith(f"{name}.") for other in names)
        if inside and hasattr(part, "save_pretrained") and hasattr(part, "config"):
            return name
    tops = {name.partition(".")[0] for name in names}
    if len(tops) != 1 or tops & set(names):
        return ""
    return tops.pop()


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


def diffusers_class(model: nn.Module) -> dict[str, str] | None:
    """Return the ``auto_mapping`` of peft's configurations for a model of diffusers, or None for other models."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("diffusers.models."):
            return {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return None

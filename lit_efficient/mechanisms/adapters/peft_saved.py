"""What peft saves of its adapters, and reads: folders of its own, and what a checkpoint keeps to write them."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.internals.wraps import temporarily
from lit_efficient.mechanisms.adapters.peft_configs import config_options, methods, peft_config
from lit_efficient.mechanisms.adapters.peft_format import described
from lit_efficient.mechanisms.adapters.peft_layers import NOTE, networks
from lit_efficient.surgery import memory_of

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def read_peft_folder(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and tensors of an adapter that peft has saved.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    place = Path(folder)
    check_sums(place)
    try:
        config = json.loads((place / _FILES[0]).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place / _FILES[0]} cannot be read: {error}") from error
    known = methods().get(config.get("peft_type", ""))
    names = [one.name for one in fields(known)] if known else [*config]
    kept = {name: one for name, one in config.items() if name in names and one is not None and name != "peft_version"}
    if isinstance(kept.get("init_lora_weights"), str):
        del kept["init_lora_weights"]  # the values are those of the file
    return kept, load_tensors(place / _FILES[1])


def saved_tensors(root: Any, name: str) -> dict[str, Tensor]:
    """What peft would save of an adapter, by the names in its file."""
    from peft.functional import get_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = root.peft_config[name]
    baseless = temporarily(config, base_model_name_or_path=None)  # or peft would ask for the base, on the network
    with baseless, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = root.state_dict()
        shared = {key: state[place] for key, place in root.__dict__[NOTE]["shared"][name].items()}
        found = get_peft_model_state_dict(root, {**state, **shared}, adapter_name=name)
    if not PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].uses_shared_state:  # a model that says so sorts them itself
        found |= {key.removesuffix(f".{name}"): tensor for key, tensor in shared.items()}
    outer = "base_model."
    return {key if key.startswith(outer) else f"{outer}model.{key}": tensor for key, tensor in found.items()}


@torch.no_grad()
def start_from(root: nn.Module, name: str, tensors: Mapping[str, Tensor], folder: str) -> None:
    """Give an adapter the values that peft has saved.

    Raises:
        ConfigurationError: If they are another network's, or peft keeps some of them outside of the module's state.
    """
    own = saved_tensors(root, name)
    wrong = sorted(own.keys() ^ tensors.keys()) or [key for key in own if own[key].shape != tensors[key].shape]
    if wrong:
        raise ConfigurationError(
            f"PeftAdapter: {folder} does not fit {type(root).__name__}: {len(wrong)} tensors are missing, unknown "
            f"or of another shape, first {wrong[0]!r}"
        )
    if beside := [key for key in _beside(root, own) if not torch.equal(own[key], tensors[key])]:
        raise ConfigurationError(
            f"PeftAdapter: {folder} has another {beside[0]!r} than is drawn here, and peft keeps that in no "
            "state_dict: a checkpoint could not hold it"
        )
    for key, place in own.items():  # which are the network's own
        place.copy_(tensors[key])


def _beside(root: nn.Module, found: Mapping[str, Tensor]) -> list[str]:
    """Those of :func:`saved_tensors` that are in no ``state_dict``."""
    state = {memory_of(tensor) for tensor in root.state_dict().values()}
    return [key for key, tensor in found.items() if memory_of(tensor) not in state]


def peft_placement(module: nn.Module) -> dict[str, Any]:
    """What an export must know of the adapters, as primitives and tensors for a checkpoint.

    Returns:
        ``root``: dotted name of the network. ``adapters``: by name the ``config``, ``files``, names in the module's
        ``state_dict`` by those in peft's file, and ``beside``, tensors that are not in there. ``active``: which take
        part, and by how much. The rest: see :func:`~lit_efficient.mechanisms.adapters.peft_format.described`.
    """
    (root,) = networks(module)
    name = next(name for name, part in module.named_modules() if part is root)
    prefix = f"{name}." if name else ""
    places = {memory_of(tensor): f"{prefix}{key}" for key, tensor in root.state_dict().items()}
    adapters = {}
    for adapter, config in root.peft_config.items():  # type: ignore[union-attr,operator]
        found = saved_tensors(root, adapter)
        adapters[adapter] = {
            "config": config_options(config),
            "files": {key: places[memory_of(t)] for key, t in found.items() if memory_of(t) in places},
            "beside": {key: t.detach().cpu().clone() for key, t in found.items() if memory_of(t) not in places},
        }
    return {"root": name, "adapters": adapters, "active": dict(root.__dict__[NOTE]["active"]), **described(root)}


def peft_files(
    where: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    """Tensors and options of each adapter in a checkpoint, as peft would save them, from what :func:`peft_placement`
    gave.
    """
    found = {}
    for name, one in where["adapters"].items():
        tensors = {key: state[place] for key, place in one["files"].items()} | one["beside"]
        found[name] = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, one["config"]
    return found


def write_peft_folder(folder: Path, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Write an adapter as peft does: its configuration by its own method, its tensors as safetensors."""
    config = peft_config(options)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_tensors(folder / _FILES[1], tensors, format="pt")

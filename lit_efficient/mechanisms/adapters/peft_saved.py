"""Reading and writing of adapters in peft's folders, and the entries of checkpoints from which they are written."""

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
from lit_efficient.mechanisms.adapters.peft_folder import described, diffusers_class
from lit_efficient.mechanisms.adapters.peft_layers import NOTE, networks
from lit_efficient.surgery import memory_of

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def read_peft_folder(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and tensors of an adapter that peft has saved.

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
    names = [*config]
    if known:
        names = [one.name for one in fields(known)]
    kept = {}
    for name, value in config.items():
        if name in names and value is not None and name != "peft_version":
            kept[name] = value
    if isinstance(kept.get("init_lora_weights"), str):
        del kept["init_lora_weights"]  # the initial values come from the file
    return kept, load_tensors(place / _FILES[1])


def saved_tensors(root: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors that peft would save of an adapter, by their names in peft's file.

    Args:
        root: The network with peft's layers.
        name: Name of the adapter.
    """
    from peft.functional import get_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = root.peft_config[name]
    baseless = temporarily(config, base_model_name_or_path=None)  # otherwise peft would look for the base online
    with baseless, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = root.state_dict()
        shared = {key: state[place] for key, place in root.__dict__[NOTE]["shared"][name].items()}
        found = get_peft_model_state_dict(root, {**state, **shared}, adapter_name=name)
    if not PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].uses_shared_state:  # otherwise peft has included them
        found |= {key.removesuffix(f".{name}"): tensor for key, tensor in shared.items()}
    outer = "base_model."
    return {key if key.startswith(outer) else f"{outer}model.{key}": tensor for key, tensor in found.items()}


@torch.no_grad()
def start_from(root: nn.Module, name: str, tensors: Mapping[str, Tensor], folder: str) -> None:
    """Copy the values that peft has saved into an adapter.

    Args:
        root: The network with peft's layers.
        name: Name of the adapter.
        tensors: Tensors of :func:`read_peft_folder`.
        folder: Folder of the adapter, for messages.

    Raises:
        ConfigurationError: If the tensors do not fit the network, or some that differ are not in its ``state_dict``.
    """
    own = saved_tensors(root, name)
    wrong = sorted(own.keys() ^ tensors.keys()) or [key for key in own if own[key].shape != tensors[key].shape]
    if wrong:
        raise ConfigurationError(
            f"PeftAdapter: {folder} does not fit {type(root).__name__}: {len(wrong)} tensors are missing, unknown "
            f"or of another shape, first {wrong[0]!r}. Use the network for which the adapter was made"
        )
    state = {memory_of(tensor) for tensor in root.state_dict().values()}
    for key, tensor in own.items():
        if memory_of(tensor) not in state and not torch.equal(tensor, tensors[key]):
            raise ConfigurationError(
                f"PeftAdapter: {folder} has other values of {key!r} than this network has drawn. peft does not put "
                "them into the state_dict, so a checkpoint could not contain them. Leave start_from out"
            )
    for key, place in own.items():  # these tensors share memory with the network's
        place.copy_(tensors[key])


def peft_placement(module: nn.Module) -> dict[str, object]:
    """Return the data of the adapters that an export needs, as primitives and tensors for a checkpoint.

    Returns:
        A dict with the following keys, and those of :func:`~lit_efficient.mechanisms.adapters.peft_folder.described`:

        - ``root``: dotted name of the network.
        - ``adapters``: for each adapter its ``config``, its ``files`` (names in the module's ``state_dict`` by the
          names in peft's file), and ``beside`` (tensors of peft's file that are not in the ``state_dict``).
        - ``active``: weight of each active adapter.
        - ``diffusers``: for a network of diffusers its ``class``, and its ``config`` in JSON.
    """
    (root,) = networks(module)
    name = next(name for name, part in module.named_modules() if part is root)
    prefix = ""
    if name:
        prefix = f"{name}."
    places = {memory_of(tensor): f"{prefix}{key}" for key, tensor in root.state_dict().items()}
    adapters = {}
    for adapter, config in root.peft_config.items():  # type: ignore[union-attr,operator]
        files: dict[str, str] = {}
        beside: dict[str, Tensor] = {}
        for key, tensor in saved_tensors(root, adapter).items():
            place = places.get(memory_of(tensor))
            if place is None:
                beside[key] = tensor.detach().cpu().clone()
            else:
                files[key] = place
        adapters[adapter] = {"config": config_options(config), "files": files, "beside": beside}
    found = {"root": name, "adapters": adapters, "active": dict(root.__dict__[NOTE]["active"]), **described(root)}
    kind = diffusers_class(root)
    if kind is not None:
        network: Any = root
        found["diffusers"] = {"class": kind["base_model_class"], "config": network.to_json_string()}
    return found


def peft_files(
    where: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, tuple[dict[str, Tensor], dict[str, object]]]:
    """Return the tensors and options of each adapter in a checkpoint, as peft would save them.

    Args:
        where: Result of :func:`peft_placement`.
        state: ``state_dict`` of the checkpoint.
    """
    found = {}
    for name, one in where["adapters"].items():
        tensors = {key: state[place] for key, place in one["files"].items()} | one["beside"]
        found[name] = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, one["config"]
    return found


def write_peft_folder(folder: Path, tensors: Mapping[str, Tensor], options: Mapping[str, object]) -> None:
    """Write an adapter's configuration and tensors to a folder in peft's format."""
    config = peft_config(options)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_tensors(folder / _FILES[1], tensors, format="pt")

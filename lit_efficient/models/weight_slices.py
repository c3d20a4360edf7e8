"""Weights for a network larger than a host: each process reads from safetensors what it holds, and nothing else.

    build on the meta device -> shard -> to_empty -> load_slices(network, folder)

Files are mapped, in one piece or in the several that an index of Hugging Face lists; of a shard only its own bytes are
read. Costs in memory: what the process holds, and one tensor's part of it in the format of the file.
Source: https://huggingface.co/docs/safetensors/index.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import map_tensors
from lit_efficient.internals.torch_modules import give_memory
from lit_efficient.internals.torch_shards import own_slices
from lit_efficient.surgery import is_sharded, local

_INDEX = ".safetensors.index.json"
WAITS = "_lit_efficient_weights"  # of a network that has been built empty: the folder of its weights


@torch.no_grad()
def load_slices(
    module: nn.Module, path: str | os.PathLike[str], names: Mapping[str, str] | None = None, strict: bool = True
) -> list[str]:
    """Give a module the weights of a folder, in place: to each process its own slices of what is sharded.

    Args:
        module: A network with memory for its weights (after ``to_empty``), sharded by DTensors or not.
        path: A safetensors file; or a folder with one, or with several and an index of Hugging Face. Where hashes lie
            beside the files, the first process compares them.
        names: What tensors are called in the files that have another name in ``module.state_dict()``.
        strict: Refuse a tensor of the module that the files lack, unless it is tied to one that they have.

    Returns:
        The names in the module of what the files lack.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is missing or of another shape.
        ConfigurationError: If a tensor is on the meta device, holds codes in the place of numbers, or is sharded such
            that no process has a slice of it.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        check_sums(path)
    places = stored_places(Path(path))
    opened: dict[Path, Any] = {}
    loaded, lacking = set[object](), dict[str, object]()
    for name, tensor in {**dict(module.named_parameters(remove_duplicate=False)), **_persistent(module)}.items():
        key = (names or {}).get(name, name)
        if id(tensor) in loaded:
            continue
        if key not in places:
            lacking[name] = id(tensor)
            continue
        file = opened.get(places[key]) or map_tensors(places[key])
        opened[places[key]] = file
        part = _own_part(file.get_slice(key), tensor, name, places[key])
        if not part:
            tensor.copy_(file.get_tensor(key))
        elif all(each.start < each.stop for each in part):
            local(tensor).copy_(file.get_slice(key)[part])
        loaded.add(id(tensor))
    missing = [name for name, memory in lacking.items() if memory not in loaded]
    if missing and strict:
        raise CheckpointError(
            f"{os.fspath(path)} lacks {len(missing)} tensors of {type(module).__name__}, first {missing[0]!r}; it has "
            f"{len(places)}, first {min(places, default='')!r}"
        )
    return missing


def fill_waiting(root: nn.Module, device: torch.device) -> int:
    """Give memory and their weights to the networks in ``root`` that were built empty, when all of it is sharded.

    Returns:
        How many there were.

    Raises:
        CheckpointError, ConfigurationError: As of :func:`load_slices`.
    """
    waiting = [network for network in root.modules() if WAITS in network.__dict__]
    if waiting:  # of the whole: whoever has sharded it must see its new parameters
        give_memory(root, device)
    for network in waiting:
        load_slices(network, network.__dict__.pop(WAITS))
    return len(waiting)


def _persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept}


def stored_places(path: Path) -> dict[str, Path]:
    """The file that each tensor of a folder lies in."""
    indexes = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if len(indexes) > 1 or (not indexes and len(files) != 1) or (files and not files[0].is_file()):
        raise CheckpointError(
            f"{path} must be a safetensors file, or a folder with one or with one index *{_INDEX}; it has "
            f"{len(indexes)} indexes and {len(files) if path.exists() else 0} files"
        )
    if not indexes:
        return dict.fromkeys(map_tensors(files[0]).keys(), files[0])
    try:
        listed = json.loads(indexes[0].read_text("utf-8"))["weight_map"]
        return {str(name): path / Path(str(file)).name for name, file in listed.items()}  # none lies elsewhere
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{indexes[0]} cannot be read ({error!r})") from error


def _own_part(stored: Any, tensor: Any, name: str, file: Path) -> tuple[slice, ...]:
    """What this process holds of a tensor; nothing of a single number, which has no parts."""
    if tensor.device.type == "meta":
        raise ConfigurationError(f"load_slices: {name!r} is on the meta device: call to_empty(device=...) first")
    if tensor.is_floating_point() is not str(stored.get_dtype()).lstrip("B").startswith("F"):
        raise ConfigurationError(f"load_slices: {name!r} is {tensor.dtype} here and {stored.get_dtype()} in {file}")
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise CheckpointError(f"{name!r} is {tuple(tensor.shape)} here and {tuple(stored.get_shape())} in {file}")
    own = own_slices(tensor) if is_sharded(tensor) else tuple(slice(0, size) for size in tensor.shape)
    if own is None:
        raise ConfigurationError(f"load_slices: {name!r} is sharded in strides, which are no slices of a file")
    return own

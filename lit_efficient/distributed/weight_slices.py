"""Weights of a network that is larger than a host: each process reads only its slices from safetensors files.

    built_empty(make) -> change -> shard -> fill_waiting(network, device)

Files are mapped, a single one or those listed in an index of Hugging Face, and only the bytes of a shard are read. A
layer that converts a weight, to codes or to experts, receives the whole weight, and each process keeps its slices of
the result.

Costs: memory for the process's own slices, and for one such layer
Source: https://huggingface.co/docs/safetensors/index.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.distributed.deferred_draws import DeferredDraws
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import map_tensors
from lit_efficient.internals.heap import give_back
from lit_efficient.internals.torch_modules import (
    FollowsWeight,
    Loads,
    give_memory,
    saved_names,
    take_attributes,
    tensor_tables,
    whole_twin,
)
from lit_efficient.internals.torch_shards import own_slices
from lit_efficient.surgery import WAITS, is_sharded, local

_INDEX = ".safetensors.index.json"
Noted = Callable[[str, Tensor, torch.dtype], object]  # name, whole tensor, format in the module


@dataclass(frozen=True)
class Waiting:
    """Source of the weights of an empty network, and the formats of its parameters."""

    source: str | DeferredDraws
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


def built_empty(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose large weights are drawn later, by :func:`fill_waiting`, after all of it is sharded.

    Weights on another device than the CPU are drawn at once, and so are buffers, which every process holds.
    """
    if torch.get_default_device().type != "cpu":
        return make()
    with DeferredDraws() as draws:
        network = make()
    draws.note(network)
    for prefix, part in network.named_modules():
        for name in [name for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta]:
            setattr(part, name, draws.get_tensor(f"{prefix}.{name}".lstrip(".")))
    dtypes = {name: p.dtype for name, p in network.named_parameters(remove_duplicate=False)}
    network.__dict__[WAITS] = Waiting(draws, dtypes)
    return network


def fill_waiting(root: nn.Module, device: torch.device, noted: Noted | None = None) -> int:
    """Allocate and fill the weights of all networks in ``root`` that were built empty, after all of it is sharded.

    Args:
        root: Any module.
        device: Device of the weights.
        noted: Called with the name of each tensor that is read, the whole tensor, and its format in the module.

    Returns:
        The number of such networks.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is missing or has another shape.
        ConfigurationError: If a file holds codes in the place of numbers, or a tensor is sharded in strides.
    """
    waiting = [(name, network) for name, network in root.named_modules() if WAITS in network.__dict__]
    empty = [_on_meta(network) for _, network in waiting]
    if waiting:  # on the whole root, because the wrapper that has sharded it must see the new parameters
        give_memory(root, device)
    for (prefix, network), names in zip(waiting, empty):
        note: Waiting = network.__dict__.pop(WAITS)
        found = _Reading(network, note.source, note.dtypes, names, noted, f"{prefix}." if prefix else "")
        missing = found.missing()
        if missing:
            raise CheckpointError(f"{note.source} lacks {len(missing)} tensors, first {missing[0]!r}")
    return len(waiting)


def _on_meta(network: nn.Module) -> set[str]:
    parts = network.named_modules(remove_duplicate=False)
    return {f"{n}.{k}".lstrip(".") for n, part in parts for k in saved_names(part) if getattr(part, k).is_meta}


class _Reading:
    """One pass over a network that fills the tensors in ``wanted``."""

    @torch.no_grad()
    def __init__(
        self,
        network: nn.Module,
        source: str | os.PathLike[str] | DeferredDraws,
        dtypes: Mapping[str, torch.dtype],
        wanted: Collection[str],
        noted: Noted | None,
        prefix: str,
    ) -> None:
        self.places: Mapping[str, Any]  # file, or records of draws, of each tensor
        self.opened: dict[Path | DeferredDraws, object] = {}
        if isinstance(source, DeferredDraws):
            self.places = dict.fromkeys(source.noted(), source)
            self.opened[source] = source
        else:
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                check_sums(source)
            self.places = stored_places(Path(source))
        self.dtypes = dtypes
        self.noted = noted
        self.prefix = prefix
        self.loaded: set[int] = set()  # identities of filled tensors
        self.lacking: dict[str, int] = {}  # names of tensors that the files lack -> identities
        self.stored: dict[int, str] = {}  # names in the files by identity: a tied tensor has several in the network
        for layer, part in network.named_modules(remove_duplicate=False):
            for name in saved_names(part):
                full = f"{layer}.{name}" if layer else name
                if full in self.places:
                    self.stored[id(getattr(part, name))] = full
        for layer, part in network.named_modules(remove_duplicate=False):
            own = {name: f"{layer}.{name}" if layer else name for name in saved_names(part)}
            own = {name: full for name, full in own.items() if full in wanted}
            if own and (isinstance(part, Loads) or (isinstance(part, FollowsWeight) and part.made_of_weight)):
                self._through(part, layer, own)
                give_back()  # without it the allocator kept 20 MiB per block of a 1B network
            else:
                for name, full in own.items():
                    self._slice(getattr(part, name), full)

    def missing(self) -> list[str]:
        """Return the names of tensors that the files lack, unless they are tied to a tensor that was filled."""
        return [name for name, tensor in self.lacking.items() if tensor not in self.loaded]

    def _file(self, name: str) -> Any:
        """Return the file of a tensor, or ``None``."""
        if name not in self.places:
            return None
        place = self.places[name]
        self.opened[place] = self.opened.get(place) or map_tensors(place)
        return self.opened[place]

    def _slice(self, tensor: Tensor, name: str) -> None:
        if id(tensor) in self.loaded:
            return
        file = self._file(name)
        if file is None:
            self.lacking[name] = id(tensor)
            return
        whole = file.get_tensor(name)  # mapped: pages are read when they are used
        if whole.is_floating_point() is not tensor.is_floating_point():
            raise ConfigurationError(f"{name!r} is {tensor.dtype} here and {whole.dtype} in {self.places[name]}")
        if whole.shape != tensor.shape:
            there = f"{tuple(whole.shape)} in {self.places[name]}"
            raise CheckpointError(f"{name!r} is {tuple(tensor.shape)} here and {there}")
        if is_sharded(tensor) or tensor.requires_grad or (whole.dtype, whole.device) != (tensor.dtype, tensor.device):
            local(tensor).copy_(whole[_slices_of(tensor, name)])
        else:
            tensor.data = whole  # a frozen weight stays in the mapped pages of the file
        self.loaded.add(id(tensor))
        if self.noted is not None:
            self.noted(self.prefix + name, whole, tensor.dtype)

    def _through(self, part: Any, layer: str, own: Mapping[str, str]) -> None:
        """Let a layer convert its whole weights, and keep this process's slices of the result."""
        before = f"{layer}." if layer else ""
        state: dict[str, Tensor] = {}
        for name, full in own.items():
            stored = self.stored.get(id(getattr(part, name)), full)
            if stored not in self.places and layer in self.places:
                stored = layer  # codes have taken the place of a parameter
            file = self._file(stored)
            if file is not None:
                whole = file.get_tensor(stored)
                state[full] = whole.to(self.dtypes.get(full, self.dtypes.get(stored, whole.dtype)))
        twin = whole_twin(part, own)
        if isinstance(part, Loads):
            twin.before_load(state, before)
        for table in tensor_tables(twin):
            table.update({n: state[before + n] for n in table if before + n in state})
        if isinstance(part, FollowsWeight):
            made = part.made_of_weight
        else:
            made = ()
        if made:
            twin.follow_weight()
        take_attributes(part, twin)
        for name in (*own, *made):
            tensor, value = getattr(part, name), getattr(twin, name)
            if name not in made and own[name] not in state:
                self.lacking[own[name]] = id(tensor)
                continue
            if tuple(value.shape) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{before + name!r} is {tuple(tensor.shape)} here, and the files make {tuple(value.shape)} of it"
                )
            local(tensor).copy_(value[_slices_of(tensor, before + name)])
            self.loaded.add(id(tensor))
            if self.noted is not None and name in own:
                self.noted(self.prefix + own[name], value, tensor.dtype)


def stored_places(path: Path) -> dict[str, Path]:
    """Return the file of each tensor in a safetensors file, or in a folder of such files.

    Raises:
        CheckpointError: If there is no safetensors file, if there are several files without an index, or several
            indexes, or if the index is damaged.
    """
    indexes: list[Path] = []
    files = [path]
    if path.is_dir():
        indexes = sorted(path.glob(f"*{_INDEX}"))
        files = sorted(path.glob("*.safetensors"))
    if len(indexes) > 1 or (not indexes and len(files) != 1) or (files and not files[0].is_file()):
        raise CheckpointError(
            f"{path} must be a safetensors file, or a folder with one or with one index *{_INDEX}; it has "
            f"{len(indexes)} indexes and {len(files) if path.exists() else 0} files"
        )
    if not indexes:
        return dict.fromkeys(map_tensors(files[0]).keys(), files[0])
    try:
        listed = json.loads(indexes[0].read_text("utf-8"))["weight_map"]
        # Only the name counts, so that an index cannot refer to files outside of the folder.
        return {str(name): path / Path(str(file)).name for name, file in listed.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{indexes[0]} cannot be read ({error!r})") from error


def _slices_of(tensor: Tensor, name: str) -> tuple[slice, ...]:
    """Return the slices of a tensor that this process holds."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    own = own_slices(tensor)
    if own is None:
        raise ConfigurationError(f"{name!r} is sharded in strides, which cannot be read as slices of a file")
    return own

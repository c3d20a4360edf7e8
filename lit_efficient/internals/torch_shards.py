"""Metadata of torch.distributed.checkpoint, and slices of DTensors. Checked with torch 2.13."""

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_METADATA = "torch.distributed.checkpoint.metadata"
# All names that torch pickles into ``.metadata``: dataclasses of numbers and strings, and two look-up functions.
_KNOWN = {(_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")}
_KNOWN |= {(_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")}
_KNOWN |= {(_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_KNOWN |= {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
_KNOWN |= {("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
_KNOWN |= {("pathlib._local", name) for _, name in _KNOWN if name.endswith("Path")}  # Python 3.13


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python before 3.11.4 pickles members of enumerations with it
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in .metadata")


def _member(kind: Any, name: str) -> object:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"getattr of {kind!r} is not allowed in .metadata")


def shards_metadata(folder: Path) -> Any:
    """Return the ``Metadata`` of a folder without running arbitrary code, as ``FileSystemReader`` would.

    Raises:
        Exception: Of any class, if the file is damaged or names other objects.
    """
    with open(folder / ".metadata", "rb") as file:
        return _Metadata(file).load()


def own_slices(tensor: Any) -> tuple[slice, ...] | None:
    """Return the slices of a DTensor in this process, or ``None``: ``compute_local_shape_and_global_offset``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(kind.is_partial() or type(kind).__name__ == "_StridedShard" for kind in tensor.placements):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))


def largest_of_all(values: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the elementwise maximum over all processes of a device mesh."""
    from torch.distributed.tensor import DTensor, Partial  # slow to import

    found = DTensor.from_local(values, mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return found.full_tensor()


def is_wrapper(tensor: object) -> bool:
    """Return whether a tensor is made of other tensors, as quantised weights of torchao, and is no shard."""
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)


def is_sharded(tensor: object) -> bool:
    """Return whether this process holds only a part of the tensor: a DTensor, as FSDP2 makes them."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """Return the shard of a DTensor that this process holds (the same memory), or the tensor itself."""
    if is_sharded(tensor):
        return tensor.to_local()
    return tensor


def reshard(root: nn.Module) -> None:
    """Free gathered copies of FSDP2's shards: a forward would use them, and their names hide the shards."""
    part: Any
    for part in root.modules():
        if type(part).__name__.startswith("FSDP") and hasattr(part, "reshard"):
            part.reshard()

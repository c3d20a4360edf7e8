"""Safetensors: files that hold tensors and nothing else, written whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import replacing


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write tensors, those that share memory (tied weights) once a name: the format knows no sharing.

    Args:
        path: Where to. Missing folders are made.
        tensors: By name, on any device.
        metadata: What the file's header says beside them.
    """
    from safetensors.torch import save_file

    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
        seen.add(memory)
    with replacing(Path(path)) as file:
        save_file(own, file.name, metadata=metadata or None)  # it opens the same file by itself


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of a file, on the CPU.

    Raises:
        CheckpointError: If there is no such file, or it is no whole safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {os.fspath(path)}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {str(error).splitlines()[0]}") from error


def map_tensors(path: str | os.PathLike[str]) -> Any:
    """A file as ``safetensors.safe_open`` gives it: a page of it is read when a number on it is."""
    from safetensors import safe_open

    return safe_open(path, "pt")

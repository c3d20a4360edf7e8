"""Safetensors: files that hold tensors and nothing else, written whole or not at all, their own hash in the header.

"__metadata__": {"sha256": hash of the whole file with 64 zeros in the place of the hash}
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import replacing_by_name
from lit_efficient.files.sums import check_sums

_UNKNOWN = b"0" * 64
_LONGEST_HEADER = 100_000_000  # what the format allows


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write tensors, those that share memory (tied weights) once a name: the format knows no sharing.

    ``metadata`` goes into the file's header.
    """
    from safetensors.torch import save_file

    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
        seen.add(memory)
    with replacing_by_name(Path(path)) as file:
        save_file(own, file, metadata={**metadata, "sha256": _UNKNOWN.decode()})
        with open(file, "r+b") as written:
            _sort_metadata(written)
            place, _, digest = _hashes(written)
            written.seek(place)
            written.write(digest)


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of a file, on the CPU; it is compared with its hash, in it or beside it, if there is one.

    Raises:
        CheckpointError: If there is no such file, or it is no whole safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open(path, "rb") as file:
            _, noted, found = _hashes(file)
        if noted != found:
            raise CheckpointError(f"{os.fspath(path)} is damaged: it does not match the hash in its header")
        if not noted:  # as other programs write it, in a folder that was exported
            check_sums(path)
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {os.fspath(path)}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {str(error).splitlines()[0]}") from error


def metadata_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """What a file's header says beside its tensors."""
    with map_tensors(path) as file:
        return dict(file.metadata() or {})


def _sort_metadata(file: IO[bytes]) -> None:
    """Give the same tensors the same bytes: safetensors writes the metadata in an order that each process draws."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    file.seek(8)
    file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length))
    file.seek(0)


def _hashes(file: IO[bytes]) -> tuple[int, bytes, bytes]:
    """Where a file's hash stands, the hash, and what it should be; of a file without one 0 and twice nothing."""
    size = file.read(8)
    header = file.read(min(int.from_bytes(size, "little"), _LONGEST_HEADER))
    place = re.search(rb'"sha256":"([^"]{64})"', header)
    if place is None:
        return 0, b"", b""
    begin, end = place.span(1)
    digest = hashlib.sha256(size + header[:begin] + _UNKNOWN + header[end:])
    while piece := file.read(1 << 20):
        digest.update(piece)
    return 8 + begin, place[1], digest.hexdigest().encode()


def map_tensors(path: str | os.PathLike[str]) -> Any:
    """A file as ``safetensors.safe_open`` gives it: a page of it is read when a number on it is."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {str(error).splitlines()[0]}") from error

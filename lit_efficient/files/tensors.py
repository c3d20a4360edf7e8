"""Safetensors files, written whole or not at all, with their own hash in the header.

"__metadata__": {"sha256": hash of the whole file with 64 zeros in the place of the hash}
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.sums import check_sums

_UNKNOWN = b"0" * 64  # in the place of the hash while the hash is computed
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format
_KINDS = {
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (64, 32, 16)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (64, 32, 16, 8)},
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (64, 32, 16, 8)},
    torch.bfloat16: "BF16", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, **metadata: str
) -> None:
    """Write tensors one after the other. Tied weights are written once for each name.

    Args:
        path: The file.
        tensors: Tensors by name.
        dtype: Number format that all tensors are converted to while they are written; None keeps each format.
        metadata: Texts for the file's header.

    Raises:
        CheckpointError: If safetensors cannot hold a value; nothing is written.
    """
    for name, value in tensors.items():
        kind = getattr(value, "dtype", type(value).__name__)
        if kind not in _KINDS:
            raise CheckpointError(f"{path}: {name!r} is {kind}, which safetensors cannot hold; a .ckpt can")
    kinds = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
    # Larger number formats come first, so that each tensor begins at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted({**metadata, "sha256": _UNKNOWN.decode()}.items()))}
    begin = 0
    for name in order:
        end = begin + tensors[name].numel() * kinds[name].itemsize
        header[name] = {"dtype": _KINDS[kinds[name]], "shape": [*tensors[name].shape], "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    encoded = len(encoded).to_bytes(8, "little") + encoded
    digest = hashlib.sha256(encoded)
    with replacing(Path(path)) as file:
        file.write(encoded)
        for name in order:
            data = bytes_of(tensors[name].to("cpu", kinds[name]))
            file.write(data)
            digest.update(data)
        file.seek(encoded.index(_UNKNOWN))
        file.write(digest.hexdigest().encode())


def bytes_of(tensor: Tensor) -> Any:
    """Return a tensor's numbers in row-major order as an array of bytes."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return all tensors of a file on the CPU, after comparing the file with its hash if there is one.

    The hash is in the file's header or in ``SHA256SUMS`` beside the file.

    Raises:
        CheckpointError: If there is no such file, or it is damaged or no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open(path, "rb") as file:
            noted, found = _hashes(file)
        if noted != found:
            raise CheckpointError(f"{os.fspath(path)} is damaged: it does not match the hash in its header")
        if not noted:  # a file of another program, perhaps in a folder that `export` wrote
            check_sums(path)
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {os.fspath(path)}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {str(error).splitlines()[0]}") from error


def zeros_in_file(kinds: Sequence[tuple[Sequence[int], torch.dtype]], folder: Path | None) -> list[Tensor]:
    """Return tensors of zeros in the pages of an unnamed file, which the system writes to disk if memory is short.

    Args:
        kinds: Shape and number format of each tensor.
        folder: Folder of the file; a folder that is not writable is replaced by ``TMPDIR``.

    Returns:
        The tensors. They are in memory if ``folder`` is None or the disk has less than twice the space.
    """
    counts = [math.prod(shape) for shape, _ in kinds]
    sizes = [max(count, 1) * dtype.itemsize for count, (_, dtype) in zip(counts, kinds)]
    *begins, end = accumulate((size + -size % 64 for size in sizes), initial=0)
    place = folder if folder and os.access(folder, os.W_OK) else None
    with (
        contextlib.suppress(OSError, AttributeError),  # an empty file, or a system that cannot reserve space
        tempfile.TemporaryFile(dir=place) as file,
    ):
        if folder is not None and shutil.disk_usage(file.fileno()).free > 2 * end:
            # Reserved, because writing to a page without space on the disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, end)
            data = mmap.mmap(file.fileno(), end)
            tensors = []
            for (shape, dtype), count, begin in zip(kinds, counts, begins):
                numbers = torch.frombuffer(data, dtype=dtype, count=count or 1, offset=begin)
                tensors.append(numbers[:count].view(shape))
            return tensors
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]


def metadata_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the texts in a file's header."""
    with map_tensors(path) as file:
        return dict(file.metadata() or {})


def _hashes(file: IO[bytes]) -> tuple[bytes, bytes]:
    """Return the hash in a file's header and the computed hash; twice b"" for a file without a hash."""
    size = file.read(8)
    header = file.read(min(int.from_bytes(size, "little"), _LONGEST_HEADER))
    place = re.search(rb'"sha256":"([^"]{64})"', header)
    if place is None:
        return b"", b""
    begin, end = place.span(1)
    digest = hashlib.sha256(size + header[:begin] + _UNKNOWN + header[end:])
    while piece := file.read(1 << 20):
        digest.update(piece)
    return place[1], digest.hexdigest().encode()


def map_tensors(path: str | os.PathLike[str]) -> Any:
    """Return ``safetensors.safe_open`` of a file: a page is read when a number on it is used.

    Raises:
        CheckpointError: If the file is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {str(error).splitlines()[0]}") from error

"""Safetensors: files that hold tensors and nothing else, written whole or not at all, their own hash in the header.

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

_UNKNOWN = b"0" * 64
_LONGEST_HEADER = 100_000_000  # what the format allows
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
    """Write tensors one after the other, tied weights once a name: the format knows no sharing.

    ``metadata`` goes into the file's header; ``dtype`` is the format that all get as they are written. What a file
    cannot hold is refused before it is written.
    """
    for name, value in tensors.items():
        if (kind := getattr(value, "dtype", type(value).__name__)) not in _KINDS:
            raise CheckpointError(f"{path}: {name!r} is {kind}, which safetensors cannot hold; a .ckpt can")
    kinds = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(sorted({**metadata, "sha256": _UNKNOWN.decode()}.items()))}
    end, order = 0, sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))  # so that all begin where they may
    for name in order:
        begin, end = end, end + tensors[name].numel() * kinds[name].itemsize
        header[name] = {"dtype": _KINDS[kinds[name]], "shape": [*tensors[name].shape], "data_offsets": [begin, end]}
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
    """A tensor's numbers in their order, as an array of bytes."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


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


def zeros_in_file(kinds: Sequence[tuple[Sequence[int], torch.dtype]], folder: Path | None) -> list[Tensor]:
    """Zeros to be filled, in the pages of a file without a name: the system writes them out where memory is short.

    Where ``folder`` may not be written to, the file is in ``TMPDIR``; without room for it twice, or without ``folder``,
    they are in memory.
    """
    counts = [math.prod(shape) for shape, _ in kinds]
    sizes = (max(count, 1) * dtype.itemsize for count, (_, dtype) in zip(counts, kinds))
    *begins, end = accumulate((size + -size % 64 for size in sizes), initial=0)
    with (
        contextlib.suppress(OSError, AttributeError),  # also of no bytes, and where nothing can be reserved
        tempfile.TemporaryFile(dir=folder if folder and os.access(folder, os.W_OK) else None) as file,
    ):
        if folder is not None and shutil.disk_usage(file.fileno()).free > 2 * end:
            os.posix_fallocate(file.fileno(), 0, end)  # a page without a place on the disk would end the process
            data, places = mmap.mmap(file.fileno(), end), zip(kinds, counts, begins)
            return [torch.frombuffer(data, dtype=d, count=n or 1, offset=at)[:n].view(s) for (s, d), n, at in places]
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]  # each of which is freed alone


def metadata_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """What a file's header says beside its tensors."""
    with map_tensors(path) as file:
        return dict(file.metadata() or {})


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

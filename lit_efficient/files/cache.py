"""Where prepared data is kept, and how it gets there whole or not at all.

A prepared folder is written beside its final place and moved there in one step, under a lock, so a killed run leaves no
half-written cache and two runs that start together prepare it once.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing, write_folder
from lit_efficient.files.sums import sha256_of

MANIFEST = "manifest.json"
_DIGEST = "sha256"


def cache_root(cache_dir: str | None = None) -> Path:
    """The folder for caches: ``cache_dir``, else ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``."""
    configured = cache_dir or os.environ.get("LIT_EFFICIENT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lit_efficient"


def cache_folder(cache_dir: str | None, kind: str, made_from: Any) -> Path:
    """The place of a cache, named by the hash of what it is made from; None as ``cache_dir`` is `cache_root`."""
    return cache_root(cache_dir) / kind / digest_of(made_from)[:32]


def digest_of(content: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prepared_folder(folder: Path, build: Callable[[Path], None], problem: Callable[[Path], str | None]) -> Path:
    """Return ``folder`` with its content built and checked; build it if it is not there.

    A damaged one is refused and not built again: a disk that has lost bytes once is for its owner to look at.
    ``problem`` says in one sentence what is wrong with a folder's content, None if it is sound.

    Raises:
        ConfigurationError: the content is damaged, or the cache cannot be written.
    """
    from filelock import FileLock

    try:
        if not folder.exists():  # what exists is complete by construction; a cache on a read-only disk needs no lock
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(folder.name + ".lock")):
                if not folder.exists():
                    write_folder(folder, build, sums=False)  # its manifest knows them
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder.parent} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a "
            "folder that can."
        ) from error
    fault = problem(folder)
    if fault is not None:
        raise ConfigurationError(
            f"The cache {folder} is damaged: {fault} Delete the folder and run again: it is made again."
        )
    return folder


def seal(folder: Path, form: int, about: Mapping[str, Any]) -> None:
    """Write the manifest over all files in ``folder``: their sizes and hashes, their format, and ``about`` as it is."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {path.relative_to(folder).as_posix(): [path.stat().st_size, sha256_of(path)] for path in files}
    write_json(folder / MANIFEST, {"format": form, "byteorder": sys.byteorder, "files": listed, **about})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that was found sound."""
    return read_json(folder / MANIFEST)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping with the hash of itself, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(with_hash(content), indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
        ValueError: If it is damaged, or no mapping.
        OSError: If it cannot be read.
    """
    try:
        return without_hash(json.loads(path.read_text("utf-8")))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def with_hash(content: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with the hash of itself."""
    return {**content, _DIGEST: _digest(content)}


def without_hash(found: Any) -> dict[str, Any]:
    """What `with_hash` was given.

    Raises:
        ValueError: If it is damaged, or no mapping.
    """
    content: dict[str, Any] = dict(found)
    if content.pop(_DIGEST, None) != _digest(content):
        raise ValueError("it is not what was written: its hash differs")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return digest_of(json.loads(json.dumps(content)))  # with keys as JSON has them


def map_numbers(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """A file of numbers mapped into memory, read-only ``[n]``."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")

"""Folders of prepared data, created once and checked before use.

A folder is written under a temporary name and renamed under a lock: a killed run leaves no partial cache, and of two
runs that start together one prepares the data. The folder's manifest records the hash of each file.
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
    """Return the folder for caches: ``cache_dir``, else ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``."""
    configured = cache_dir or os.environ.get("LIT_EFFICIENT_CACHE") or "~/.cache/lit_efficient"
    return Path(configured).expanduser()


def cache_folder(cache_dir: str | None, kind: str, made_from: object) -> Path:
    """Return the folder of one cache in :func:`cache_root`, named by the hash of the plain data ``made_from``."""
    return cache_root(cache_dir) / kind / digest_of(made_from)[:32]


def digest_of(content: object) -> str:
    """Return the SHA-256 of plain data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prepared_folder(folder: Path, build: Callable[[Path], None], problem: Callable[[Path], str | None]) -> Path:
    """Return ``folder`` after checking its content; build the folder first if it does not exist.

    A damaged folder is refused and not rebuilt, because a disk that has lost data needs its owner's attention.

    Args:
        folder: Path of the prepared data.
        build: Function that fills a temporary folder.
        problem: Function that returns a sentence about damaged content, or None.

    Raises:
        ConfigurationError: If the content is damaged or the cache cannot be written.
    """
    from filelock import FileLock

    try:
        if not folder.exists():  # an existing folder is complete; on a read-only disk no lock could be created
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(folder.name + ".lock")):
                if not folder.exists():
                    write_folder(folder, build, sums=False)  # the manifest has the hashes
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder.parent} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a "
            "writable folder."
        ) from error
    fault = problem(folder)
    if fault is not None:
        raise ConfigurationError(
            f"The cache {folder} is damaged: {fault} Delete the folder and run again to rebuild it."
        )
    return folder


def seal(folder: Path, form: int, about: Mapping[str, object]) -> None:
    """Write the manifest of a folder: format number ``form``, size and hash of each file, and ``about`` unchanged."""
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            listed[path.relative_to(folder).as_posix()] = [path.stat().st_size, sha256_of(path)]
    write_json(folder / MANIFEST, {"format": form, "byteorder": sys.byteorder, "files": listed, **about})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest that :func:`seal` wrote."""
    return read_json(folder / MANIFEST)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a mapping and its hash atomically."""
    with replacing(path) as file:
        file.write((json.dumps(with_hash(content), indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping that :func:`write_json` wrote.

    Raises:
        ValueError: If the file is damaged or holds no mapping.
        OSError: If the file cannot be read.
    """
    try:
        return without_hash(json.loads(path.read_text("utf-8")))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def with_hash(content: Mapping[str, object]) -> dict[str, object]:
    """Return a mapping with an entry for its own hash."""
    # Through JSON, because numbers and keys must be hashed as a reader finds them.
    return {**content, _DIGEST: digest_of(json.loads(json.dumps(content)))}


def without_hash(found: Any) -> dict[str, object]:
    """Return the mapping that :func:`with_hash` was given.

    Raises:
        ValueError: If the hash differs or ``found`` is no mapping.
    """
    content: dict[str, Any] = dict(found)
    content.pop(_DIGEST, None)
    if with_hash(content) != found:
        raise ValueError("it is not what was written: its hash differs")
    return content


def map_numbers(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """Return the numbers of a file as a read-only array ``[n]`` that is mapped from disk."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")

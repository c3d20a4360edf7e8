"""A cache folder that is whole or absent: safetensors files under a manifest that knows the hash of each.

The folder is filled under another name and renamed when complete, under a lock, so that a killed process leaves nothing
that looks finished and two processes do the work once. Everything is checked when it is opened.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import ConfigurationError

MANIFEST = "manifest.json"

Contents = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]


def make_once(folder: Path, key: str, make: Callable[[], Contents]) -> None:
    """Fill ``folder`` unless it is there.

    Args:
        folder: Where the result belongs.
        key: Hash of everything that the content depends on; it is written into the manifest.
        make: Returns {file name: {tensor name: tensor}} and a JSON-able dictionary of facts for the manifest.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    from filelock import FileLock

    if folder.exists():  # complete by construction; read-only caches need no lock
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.exists():
                _write(folder, key, *make())
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write the cache {folder}: {error}. Choose another place with cache_dir or LIT_EFFICIENT_CACHE."
        ) from error


def open_checked(folder: Path, key: str) -> Contents:
    """Read what ``make_once`` wrote.

    Args:
        folder: The folder.
        key: The key that its content must have.

    Returns:
        {file name: {tensor name: tensor}} and the manifest.

    Raises:
        ConfigurationError: Something is missing, altered, or made from something else. Nothing is repaired silently.
    """
    from safetensors.torch import load_file

    mend = f"Delete the folder {folder} and run again: it is made anew."
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        found = manifest["key"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"The cache's manifest {folder / MANIFEST} cannot be read ({error!r}). {mend}"
        ) from error
    if found != key:
        raise ConfigurationError(f"The cache {folder} was made from other data or settings ({found} for {key}). {mend}")
    for name, expected in files.items():
        if not (folder / name).is_file():
            raise ConfigurationError(f"The cache file {folder / name} is missing. {mend}")
        if _hash(folder / name) != expected:
            raise ConfigurationError(
                f"The cache file {folder / name} is corrupt: its hash is not the manifest's. {mend}"
            )
    return {name: load_file(folder / name) for name in files}, manifest


def _write(folder: Path, key: str, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: we hold the lock
    unfinished.mkdir()
    for name, content in tensors.items():
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, unfinished / name)
    manifest = {**facts, "key": key, "files": {name: _hash(unfinished / name) for name in tensors}}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, folder)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""A cache folder that is whole or absent: safetensors files under a manifest that knows the hash of each.

What was made at length is never made again silently: everything is checked when the folder is opened, and refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import prepared_folder, read_json, write_json
from lit_efficient.files.sums import sha256_of
from lit_efficient.files.tensors import load_tensors, save_tensors

MANIFEST = "manifest.json"

Contents = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]


def make_once(folder: Path, key: str, make: Callable[[], Contents]) -> None:
    """Fill ``folder`` unless it is there; ``key``, a hash of all that the content depends on, goes into the manifest.

    ``make`` returns {file name: {tensor name: tensor}} and a JSON-able dictionary of facts for the manifest.
    """
    prepared_folder(folder, lambda empty: _write(empty, key, *make()), lambda _: None)


def open_checked(folder: Path, key: str) -> Contents:
    """Read what ``make_once`` wrote: {file name: {tensor name: tensor}} and the manifest.

    Raises:
        ConfigurationError: Something is missing, altered, or made from something else. Nothing is repaired silently.
    """
    mend = f"Delete the folder {folder} and run again: it is made again."
    try:
        manifest = read_json(folder / MANIFEST)
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
        if sha256_of(folder / name) != expected:
            raise ConfigurationError(
                f"The cache file {folder / name} is corrupt: its hash is not the manifest's. {mend}"
            )
    return {name: load_tensors(folder / name) for name in files}, manifest


def _write(folder: Path, key: str, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> None:
    for name, content in tensors.items():
        save_tensors(folder / name, content)
    manifest = {**facts, "key": key, "files": {name: sha256_of(folder / name) for name in tensors}}
    write_json(folder / MANIFEST, manifest)

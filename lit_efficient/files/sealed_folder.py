"""Cache folders of safetensors files that are costly to make: built once, and checked in full when opened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import prepared_folder, read_manifest, seal
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.files.tensors import load_tensors, save_tensors

_FORMAT = 1

Contents = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]


def make_once(folder: Path, key: str, make: Callable[[], Contents]) -> None:
    """Fill ``folder`` if it does not exist.

    Args:
        folder: Path of the cache.
        key: Hash of everything that the content depends on.
        make: Function that returns {file name: {tensor name: tensor}} and facts for the manifest, as plain data.
    """

    def build(empty: Path) -> None:
        tensors, facts = make()
        for name, content in tensors.items():
            save_tensors(empty / name, content)
        seal(empty, _FORMAT, {**facts, "key": key})

    prepared_folder(folder, build, lambda _: None)  # open_checked compares the hashes


def open_checked(folder: Path, key: str) -> Contents:
    """Return {file name: {tensor name: tensor}} and the manifest that :func:`make_once` wrote.

    Raises:
        ConfigurationError: If a file is missing or changed, or the folder was made with another key.
    """
    advice = f"Delete the folder {folder} and run again to rebuild it."
    fault = broken_seal(folder, _FORMAT, thorough=True)
    if fault is not None:
        raise ConfigurationError(f"The cache {folder} is damaged: {fault} {advice}")
    manifest = read_manifest(folder)
    if manifest["key"] != key:
        raise ConfigurationError(f"The cache {folder} was made from other data or settings. {advice}")
    return {name: load_tensors(folder / name) for name in manifest["files"]}, manifest

"""Facts about files that are costly to find, such as a model's fingerprint, kept under a hash of the files' contents.

The store is optional: facts that are missing, damaged or cannot be written are found again.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, digest_of, read_json, write_json
from lit_efficient.files.file_hashes import hash_files

_FORMAT = 1  # part of each key; increase it when facts change their meaning


def content_key(asked: object, places: Sequence[Path], libraries: Sequence[str]) -> str | None:
    """Return the key of a question about files.

    Args:
        asked: The question as plain data.
        places: Files, or folders whose files all count. Other contents give another key.
        libraries: Packages whose versions are part of the key.

    Returns:
        The key, or None if the files cannot be read or a package is not installed.
    """
    files: list[Path] = []
    for place in places:
        if not place.exists():
            return None
        files += [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    if not files:
        return None
    try:
        hashes = hash_files(places[0], files)
        versions = [importlib.metadata.version(name) for name in libraries]
    except (ConfigurationError, importlib.metadata.PackageNotFoundError):
        return None
    return digest_of([_FORMAT, asked, [file.name for file in files], hashes, versions])[:32]


def known_facts(key: str | None) -> dict[str, Any]:
    """Return the facts under a key; an empty dictionary if there are none."""
    if key is None:
        return {}
    try:
        return read_json(_file(key))
    except (OSError, ValueError):
        return {}


def note_facts(key: str | None, facts: Mapping[str, object]) -> None:
    """Add facts under a key; without a key do nothing."""
    if key is None:
        return
    try:
        write_json(_file(key), known_facts(key) | dict(facts))
    except OSError:  # a cache on a read-only disk
        return


def beside_facts(key: str, name: str) -> Path:
    """Return the path of a further file that belongs to a key."""
    return _file(key).with_suffix(f".{name}")


def _file(key: str) -> Path:
    return cache_root() / "facts" / f"{key}.json"

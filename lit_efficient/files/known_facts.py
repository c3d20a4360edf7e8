"""What was once found out about files, kept under the hash of their contents: nobody loads them to find it out again.

A file of facts is a shortcut: where it is missing, damaged or cannot be written, they are found out anew.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, read_json, write_json
from lit_efficient.files.file_hashes import hash_files

_FORMAT = 1  # part of every key: raise it when facts change their meaning


def content_key(asked: Any, places: Sequence[Path], libraries: Sequence[str]) -> str | None:
    """A name for what is asked of some files, that is another one for other contents; None if they cannot be read.

    Of folders all files count, and of ``libraries`` the versions.
    """
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    files = [file for file in files if file.is_file()]
    if not files or not all(place.exists() for place in places):
        return None
    try:
        hashes = hash_files(places[0], files)
        versions = [importlib.metadata.version(name) for name in libraries]
    except (ConfigurationError, importlib.metadata.PackageNotFoundError):
        return None
    names = [file.name for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, asked, names, hashes, versions]).encode()).hexdigest()[:32]


def known_facts(key: str | None) -> dict[str, Any]:
    """What is known under a key; nothing where nobody has noted it."""
    try:
        return {} if key is None else read_json(_file(key))
    except (OSError, ValueError):
        return {}


def note_facts(key: str | None, facts: Mapping[str, Any]) -> None:
    """Add to what is known under a key; without one nothing is noted."""
    if key is None:
        return
    try:
        write_json(_file(key), known_facts(key) | dict(facts))
    except OSError:
        return  # a cache on a read-only disk


def beside_facts(key: str, name: str) -> Path:
    """Where a file lies that belongs to the facts under a key."""
    return _file(key).with_suffix(f".{name}")


def _file(key: str) -> Path:
    return cache_root() / "facts" / f"{key}.json"

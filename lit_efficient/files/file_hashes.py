"""Hashes of files that are computed once: a file of the size and time that it had is not read again.

The rule of make and git, and git's care: a file that was changed so shortly before it was hashed that a later change
could bear the same time is hashed again the next time.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.cache import cache_root
from lit_efficient.files.sums import sha256_of

_SETTLED = 2_000_000_000  # nanoseconds: the coarsest clock of a file system in use


def hash_files(root: Path, files: Sequence[Path], cache_dir: str | None = None) -> list[str]:
    """SHA-256 of the content of each file below ``root``, the folder or file that the user named: one list is kept for
    it.
    """
    folder = cache_root(cache_dir) / "file_hashes"
    listing = folder / f"{hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:32]}.json"
    known, now, fresh = _read(listing), time.time_ns(), False
    entries: dict[str, list[Any]] = {}
    for file in files:
        name = str(file.absolute())
        try:
            stat = file.stat()
            entry = known.get(name)
            if entry is None or entry[:2] != [stat.st_size, stat.st_mtime_ns] or entry[3] - entry[1] < _SETTLED:
                entry, fresh = [stat.st_size, stat.st_mtime_ns, sha256_of(file), now], True
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}.") from error
        entries[name] = entry
    if fresh:
        _write(listing, known | entries)
    return [entries[str(file.absolute())][2] for file in files]


def _read(listing: Path) -> dict[str, list[Any]]:
    try:
        found: dict[str, list[Any]] = json.loads(listing.read_text("utf-8"))
    except (OSError, ValueError):  # not there yet, or not whole: it is only a shortcut
        return {}
    return found


def _write(listing: Path, entries: dict[str, list[Any]]) -> None:
    try:
        os.makedirs(listing.parent, exist_ok=True)
        with replacing(listing) as file:
            file.write(json.dumps(entries).encode())
    except OSError:  # a cache on a read-only disk: the files are hashed each time
        return

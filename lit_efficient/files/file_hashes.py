"""Hashes of files that are computed once: a file of the size and time that it had is not read again.

The rule of make and git, and git's care: a file that was changed so shortly before it was hashed that a later change
could bear the same time is hashed again the next time.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.cache import MANIFEST, cache_root, read_manifest
from lit_efficient.files.sums import sha256_of

_SETTLED = 2_000_000_000  # nanoseconds: the coarsest clock of a file system in use
_LARGE = 2**30  # bytes of a folder


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


def altered_file(folder: Path, recorded: Mapping[str, tuple[int, str]], thorough: bool) -> str | None:
    """Which file of a folder has another size or SHA-256 than is recorded, in one sentence; None if all are as they
    were.

    ``thorough``: contents are compared (about 1 s a GB), not only sizes; of a folder above 1 GiB once for each size and
    time of a file, or ten million latents would begin minutes late.
    """
    for name, (size, _) in recorded.items():
        path = folder / name
        if not path.is_file() or ".." in Path(name).parts or Path(name).is_absolute():
            return f"{name} is missing, or not in the folder."
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written."
    if not thorough:
        return None
    paths = [folder / name for name in recorded]
    large = sum(size for size, _ in recorded.values()) > _LARGE
    found = hash_files(folder, paths) if large else map(sha256_of, paths)
    wrong = (name for (name, (_, digest)), now in zip(recorded.items(), found) if now != digest)
    return next((f"{name} is not what was written (its SHA-256 differs)." for name in wrong), None)


def broken_seal(folder: Path, form: int, thorough: bool) -> str | None:
    """What of a folder is not as `seal` found it, in one sentence; None if nothing. Else as `altered_file`."""
    try:
        manifest = read_manifest(folder)
        if (manifest["format"], manifest["byteorder"]) != (form, sys.byteorder):
            return f"{MANIFEST} is of another format or machine."
        listed = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable."
    return altered_file(folder, listed, thorough)


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

"""Hashes of files that are computed once and kept while the file's size and modification time stay the same.

Make and git use the same rule. Like git, a file that was modified less than two seconds before it was hashed is hashed
again the next time, because a later modification could have the same time stamp.
"""

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.cache import MANIFEST, cache_root, read_manifest
from lit_efficient.files.sums import sha256_of

_SETTLED = 2_000_000_000  # nanoseconds: resolution of the coarsest file-system clock in use
_LARGE = 2**30  # bytes of a folder
_Entry = tuple[int, int, str, int]  # size, modification time, hash, time of hashing


def hash_files(root: Path, files: Sequence[Path], cache_dir: str | None = None) -> list[str]:
    """Return the SHA-256 of each file.

    Args:
        root: The folder or file that the user named. The hashes of one root are kept in one list.
        files: Files in ``root``.
        cache_dir: Cache folder, as for :func:`~lit_efficient.files.cache.cache_root`.

    Raises:
        ConfigurationError: If a file cannot be read.
    """
    name = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:32]
    listing = cache_root(cache_dir) / "file_hashes" / f"{name}.json"
    known = _read(listing)
    now = time.time_ns()
    entries: dict[str, _Entry] = {}
    for file in files:
        try:
            stat = file.stat()
            size, modified, digest, hashed = known.get(str(file.absolute()), (-1, 0, "", 0))
            if (size, modified) != (stat.st_size, stat.st_mtime_ns) or hashed - modified < _SETTLED:
                digest, hashed = sha256_of(file), now
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}.") from error
        entries[str(file.absolute())] = (stat.st_size, stat.st_mtime_ns, digest, hashed)
    if any(hashed == now for _, _, _, hashed in entries.values()):
        _write(listing, known | entries)
    return [entries[str(file.absolute())][2] for file in files]


def altered_file(folder: Path, recorded: Mapping[str, tuple[int, str]], thorough: bool) -> str | None:
    """Return a sentence about the first file that differs from its record, or None.

    Args:
        folder: Folder of the files.
        recorded: Size in bytes and SHA-256 of each file, by its path in the folder.
        thorough: Compare hashes, too (about 1 s per GB). In a folder above 1 GiB a file is hashed again only if its
            size or modification time changed.
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
    for (name, (_, digest)), current in zip(recorded.items(), found):
        if current != digest:
            return f"{name} is not what was written (its SHA-256 differs)."
    return None


def broken_seal(folder: Path, form: int, thorough: bool) -> str | None:
    """Return a sentence about the first difference from the manifest that ``seal`` wrote, or None.

    Args:
        folder: Folder with a manifest.
        form: Expected format number.
        thorough: As for :func:`altered_file`.
    """
    try:
        manifest = read_manifest(folder)
        if (manifest["format"], manifest["byteorder"]) != (form, sys.byteorder):
            return f"{MANIFEST} is of another format or machine."
        listed = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable."
    return altered_file(folder, listed, thorough)


def _read(listing: Path) -> dict[str, _Entry]:
    try:
        found = json.loads(listing.read_text("utf-8"))
        return {name: (size, modified, digest, hashed) for name, (size, modified, digest, hashed) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged; the files are hashed again
        return {}


def _write(listing: Path, entries: Mapping[str, _Entry]) -> None:
    try:
        with replacing(listing) as file:
            file.write(json.dumps(entries).encode())
    except OSError:  # a cache on a read-only disk: the files are hashed each time
        return

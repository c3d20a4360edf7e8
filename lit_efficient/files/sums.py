"""SHA256SUMS: the hashes of a folder's files beside them, as ``sha256sum --check SHA256SUMS`` reads them.

They tell of damage, not of an attacker, who would write others.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from lit_efficient.errors import CheckpointError
from lit_efficient.files.hidden_names import hidden_beside

NAME = "SHA256SUMS"


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the hashes of all files in a folder; those that are known, by their paths in it, are not read again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    lines = [f"{(known or {}).get(name) or sha256_of(path)}  {name}\n" for name, path in names.items()]
    with hidden_beside(folder.with_name(f"{folder.name[:80]}.{NAME}")) as written:
        written.write_text("".join(lines), "utf-8")
        os.replace(written, folder / NAME)  # others may do the same


def _check_indexes(folder: Path) -> None:
    """Refuse lists of weights in a folder, or in those below it, that name a file elsewhere."""
    for index in sorted([*folder.glob("*.index.json"), *folder.glob("*/*.index.json")]):
        try:
            names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            continue  # whoever reads it says so
        for name in names:
            if Path(str(name)).name != name:
                raise CheckpointError(f"{index} lists {name!r}, which is not in its folder")


def check_sums(path: str | os.PathLike[str] | None, below: str | None = None, weights: bool = True) -> None:
    """Compare a folder's files, or a file, with the hashes that lie there or in a folder above, where there are some.

    Args:
        path: A folder or a file; anything else, as a name on a hub, is left alone.
        below: A folder in it whose files alone count.
        weights: Whether files of weights count: who reads a tokenizer or a configuration alone need not wait for them.

    Raises:
        CheckpointError: Naming the file that is missing or not what was written.
    """
    place = Path(path or "", below or "").expanduser()
    if path and place.is_dir():
        _check_indexes(place)
    sums = next((folder / NAME for folder in (place, *place.parents[:2]) if (folder / NAME).is_file()), None)
    if not path or sums is None or not place.exists():
        return
    for line in sums.read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        path = sums.parent / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{sums} lists {name!r}, which is not in its folder")
        counts = place in (path, *path.parents) and (weights or path.suffix != ".safetensors")
        if counts and (not path.is_file() or sha256_of(path) != digest):
            raise CheckpointError(
                f"{path} is missing, or not what was written (its SHA-256 differs from {sums}). If it was changed on "
                f"purpose, delete {NAME}; if it is a cache, the folder"
            )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

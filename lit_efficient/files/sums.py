"""``SHA256SUMS``: hashes of a folder's files, in the format of ``sha256sum --check SHA256SUMS``.

They reveal damage. They do not stop an attacker, who could write other hashes.
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
    """Write the hashes of all files in a folder.

    Args:
        folder: The folder.
        known: Hashes by path in the folder that need not be computed.
    """
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / NAME:
            name = path.relative_to(folder).as_posix()
            digest = (known or {}).get(name) or sha256_of(path)
            lines.append(f"{digest}  {name}\n")
    # The temporary name is outside of the folder: several processes may write the same hashes at the same time.
    with hidden_beside(folder.with_name(f"{folder.name[:80]}.{NAME}")) as written:
        written.write_text("".join(lines), "utf-8")
        os.replace(written, folder / NAME)


def check_sums(path: str | os.PathLike[str] | None, below: str | None = None, weights: bool = True) -> None:
    """Compare files with the hashes in their folder or a folder above, if there are any.

    Args:
        path: A folder or a file. Anything else, such as a name on a hub, is ignored.
        below: Check only this subfolder or file of ``path``.
        weights: Check files of weights, too. Readers of a tokenizer or a configuration can skip them.

    Raises:
        CheckpointError: If a file is missing or differs, or a listing names files outside of its folder.
    """
    place = Path(path or "", below or "").expanduser()
    if not path or not place.exists():
        return
    if place.is_dir():
        _check_indexes(place)
    sums = next((folder / NAME for folder in (place, *place.parents[:2]) if (folder / NAME).is_file()), None)
    if sums is None:
        return
    for line in sums.read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        file = sums.parent / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{sums} lists the path {name!r}, which leads out of its folder: it is refused")
        asked = place in (file, *file.parents) and (weights or file.suffix != ".safetensors")
        if asked and (not file.is_file() or sha256_of(file) != digest):
            raise CheckpointError(
                f"{file} is missing, or not what was written (its SHA-256 differs from {sums}). If you changed it on "
                f"purpose, delete {NAME}; if it is in a cache, delete the cache's folder"
            )


def _check_indexes(folder: Path) -> None:
    """Raise an error if an index of weights in a folder, or in its subfolders, names a file elsewhere."""
    for index in sorted([*folder.glob("*.index.json"), *folder.glob("*/*.index.json")]):
        try:
            names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            continue  # the program that loads the index reports it
        for name in names:
            if Path(str(name)).name != name:
                raise CheckpointError(f"{index} lists the path {name!r}, which leads out of its folder: it is refused")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

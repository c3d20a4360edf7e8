"""SHA256SUMS: the hashes of a folder's files beside them, as ``sha256sum --check SHA256SUMS`` reads them.

They tell of damage, not of an attacker, who would write others.
"""

import hashlib
import os
from pathlib import Path

from lit_efficient.errors import CheckpointError

NAME = "SHA256SUMS"


def write_sums(folder: Path) -> None:
    """Write the hashes of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    lines = [f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / NAME).write_text("".join(lines), "utf-8")


def check_sums(folder: str | os.PathLike[str] | None, below: str | None = None) -> None:
    """Compare the files of a folder with the hashes beside them, where there are some.

    Args:
        folder: A folder; anything else, as a name on a hub, is left alone.
        below: A folder in it whose files alone count.

    Raises:
        CheckpointError: Naming the file that is missing or not what was written.
    """
    sums = Path(folder or "").expanduser() / NAME
    if folder is None or not sums.is_file():
        return
    for line in sums.read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        path = sums.parent / name
        if name.startswith(f"{below}/" if below else "") and (not path.is_file() or sha256_of(path) != digest):
            raise CheckpointError(
                f"{path} is missing, or not what was written (its SHA-256 differs from {sums}). If it was changed on "
                f"purpose, delete {NAME}"
            )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

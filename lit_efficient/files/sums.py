"""Hashes beside the files of a folder, in the form that ``sha256sum -c SHA256SUMS`` reads: against damage."""

from pathlib import Path

from lit_efficient.errors import CheckpointError
from lit_efficient.files.cache import sha256_of

NAME = "SHA256SUMS"


def write_sums(folder: Path) -> None:
    """Write the hash of every file under ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / NAME).write_text("".join(lines), "utf-8")


def check_sums(folder: Path) -> None:
    """Compare the files of a folder with the hashes beside them; one without hashes passes.

    Raises:
        CheckpointError: Naming the first file that is missing or altered.
    """
    listed = folder / NAME
    for line in listed.read_text("utf-8").splitlines() if listed.is_file() else ():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is missing or damaged: its hash is not that in {NAME}")

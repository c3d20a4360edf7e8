"""Text files for a language model: find them, read them once, and split them so that no text is on both sides.

The split is by file, and a hash of the relative path decides it. Adding or removing files moves no other file to the
other side. Files with exactly the same content count once.
"""

import hashlib
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_efficient.errors import ConfigurationError

# In the standard library: tests, tables, generated text, the editor, and packages that later versions lack.
EXCLUDE = (
    *("site-packages", "dist-packages", "__pycache__", "node_modules", "test", "tests", "idlelib", "turtledemo"),
    *("lib2to3", "distutils", "ensurepip", "pydoc_data", "encodings"),
)


@dataclass(frozen=True)
class TextFile:
    """File that was read as UTF-8 text."""

    path: str  # relative to the folder that was named
    text: str
    digest: str  # SHA-256 of its bytes


@dataclass(frozen=True)
class Texts:
    """Files that were read, and paths that were left out."""

    files: list[TextFile]
    duplicates: list[str]  # content as of another file
    unreadable: list[str]  # no UTF-8 text
    empty: list[str]  # nothing but white space


def standard_library() -> Path:
    """Return the folder of Python's standard library, which every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Iterable[str | Path], suffixes: Iterable[str], exclude: Iterable[str]) -> list[tuple[str, Path]]:
    """Return the files to read as (relative path, path), in an order that does not depend on the file system.

    Args:
        paths: Folders, which are searched with everything below them, and files, which are taken whatever their suffix.
        suffixes: Ends of the names of files in folders, such as ``[".py"]``.
        exclude: Names of folders to leave out. Hidden folders are always left out.

    Raises:
        ConfigurationError: If a path does not exist, or a folder holds no such file.
    """
    endings = tuple(suffixes)
    excluded = set(exclude)
    found: list[tuple[str, Path]] = []
    for root in map(Path, paths):
        if root.is_file():
            found.append((root.name, root))
            continue
        if not root.is_dir():
            raise ConfigurationError(f"paths: no such file or folder: {root} (looked for {root.absolute()}).")
        here: list[tuple[str, Path]] = []
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in excluded and not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if name.endswith(endings) and path.is_file():
                    here.append((path.relative_to(root).as_posix(), path))
        if not here:
            raise ConfigurationError(
                f"paths: the folder {root} holds no file that ends with one of suffixes = {list(endings)} outside the "
                f"folders in exclude."
            )
        found += sorted(here)
    return found


def read_texts(files: Iterable[tuple[str, Path]]) -> Texts:
    """Read each file once, as UTF-8. Empty files, exact duplicates and files that are no text are left out.

    Raises:
        ConfigurationError: If a file cannot be read.
    """
    kept: list[TextFile] = []
    seen: set[str] = set()
    duplicates = []
    unreadable = []
    empty = []
    for relative, path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"paths: {path} cannot be read: {error}.") from error
        if not content.strip():
            empty.append(relative)
            continue
        # A file that occurs twice could be on both sides of the split.
        digest = hashlib.sha256(content).hexdigest()
        if digest in seen:
            duplicates.append(relative)
            continue
        seen.add(digest)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            unreadable.append(relative)
            continue
        if text.strip():  # also without the white space that is not ASCII
            kept.append(TextFile(relative, text, digest))
        else:
            empty.append(relative)
    return Texts(kept, duplicates, unreadable, empty)


def split_texts(files: list[TextFile], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Return training and validation texts. Neither is empty unless a single file has less than two characters.

    With a ``fraction`` of 0 all files are for training.

    A file is for validation if the hash of (seed, path), as a number in [0, 1), is below ``fraction``. If no file is,
    the file with the smallest number is. A single file is cut instead, and its last part is the validation text.

    Args:
        files: At least one file.
        fraction: Approximate share of the files for validation, at least 0 and below 1.
        seed: Seed of the split.
    """
    if fraction == 0:
        return [file.text for file in files], []
    if len(files) == 1:
        text = files[0].text
        end = min(len(text) - 1, math.ceil(len(text) * (1 - fraction)))
        return [text[:end]], [text[end:]]
    seen: Counter[str] = Counter()
    ranks = []
    for file in files:
        name = f"{seed}:{file.path}"
        # Several folders may hold the same relative path.
        if seen[file.path]:
            name += f":{seen[file.path]}"
        ranks.append(unit_hash(name))
        seen[file.path] += 1
    lowest = min(ranks)
    highest = max(ranks)
    train = []
    val = []
    for file, rank in zip(files, ranks, strict=True):
        # With few files or an extreme fraction, each side still gets at least one file.
        if rank == lowest or (rank < fraction and rank != highest):
            val.append(file.text)
        else:
            train.append(file.text)
    return train, val


def unit_hash(text: str) -> float:
    """Return a number in [0, 1) from the hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48

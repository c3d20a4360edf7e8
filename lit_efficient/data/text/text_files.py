"""Text files for a language model: find them, read them once, split them so that nothing leaks.

The split is by file, decided by a hash of the file's relative path: adding or removing files moves no other file to the
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

# Of the standard library: tests, tables, generated text, the editor and what left the library in later versions.
EXCLUDE = (
    *("site-packages", "dist-packages", "__pycache__", "node_modules", "test", "tests", "idlelib", "turtledemo"),
    *("lib2to3", "distutils", "ensurepip", "pydoc_data", "encodings"),
)


@dataclass(frozen=True)
class TextFile:
    """One readable file: its path relative to the folder that was named, its text and the SHA-256 of its bytes."""

    path: str
    text: str
    digest: str


@dataclass(frozen=True)
class Texts:
    """What was read: the files, and the paths that were left out as duplicates or because they are not UTF-8 text."""

    files: list[TextFile]
    duplicates: list[str]
    unreadable: list[str]


def standard_library() -> Path:
    """The folder of Python's standard library, which every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Iterable[str | Path], suffixes: Iterable[str], exclude: Iterable[str]) -> list[tuple[str, Path]]:
    """List the files to read as (relative path, path), in an order that does not depend on the file system.

    Args:
        paths: folders, searched with all that is below them, and files, taken whatever their suffix.
        suffixes: what a file's name must end with, e.g. ``[".py"]``.
        exclude: names of folders to pass over wherever they are; hidden ones always are.

    Raises:
        ConfigurationError: a path that does not exist, or a folder without a single such file.
    """
    endings, passed_over = tuple(suffixes), set(exclude)
    found: list[tuple[str, Path]] = []
    for root in map(Path, paths):
        if root.is_file():
            found.append((root.name, root))
            continue
        if not root.is_dir():
            raise ConfigurationError(f"paths: no such file or folder: {root} (looked for {root.absolute()}).")
        here: list[tuple[str, Path]] = []
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in passed_over and not name.startswith(".")]
            paths_here = [Path(folder, name) for name in names if name.endswith(endings)]
            here += [(path.relative_to(root).as_posix(), path) for path in paths_here if path.is_file()]
        if not here:
            raise ConfigurationError(
                f"paths: the folder {root} holds no file that ends with one of suffixes = {list(endings)} outside the "
                f"folders in exclude."
            )
        found += sorted(here)
    return found


def read_texts(files: Iterable[tuple[str, Path]]) -> Texts:
    """Read each file once, as UTF-8; empty files, exact duplicates and files that are no text are left out."""
    kept: list[TextFile] = []
    seen: set[str] = set()
    duplicates, unreadable = [], []
    for relative, path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"paths: {path} cannot be read: {error}.") from error
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
        if text.strip():
            kept.append(TextFile(relative, text, digest))
    return Texts(kept, duplicates, unreadable)


def split_texts(files: list[TextFile], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Training and validation texts, both non-empty unless a single file has less than two characters.

    A file goes to validation if the hash of (seed, path), read as a number in [0, 1), is below ``fraction``; if none
    is, the file with the smallest one goes. A single file is cut instead: its last part is the validation text.

    Args:
        files: at least one.
        fraction: about this part of the files is for validation, in (0, 1).
        seed: another seed gives another split.
    """
    if len(files) == 1:
        text = files[0].text
        cut = min(len(text) - 1, math.ceil(len(text) * (1 - fraction)))
        return [text[:cut]], [text[cut:]]
    seen: Counter[str] = Counter()
    ranks = []
    for file in files:  # folders given together may hold the same relative path: the later ones get their own rank
        ranks.append(unit_hash(f"{seed}:{file.path}" + f":{seen[file.path]}" * (seen[file.path] > 0)))
        seen[file.path] += 1
    # Few files or an extreme fraction: each side gets at least one.
    low, high = min(ranks), max(ranks)
    held_out = [rank == low or (rank < fraction and rank != high) for rank in ranks]
    train = [file.text for file, held in zip(files, held_out, strict=True) if not held]
    return train, [file.text for file, held in zip(files, held_out, strict=True) if held]


def unit_hash(text: str) -> float:
    """A number in [0, 1) from a text: what decides the split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48

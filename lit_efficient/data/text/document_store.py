"""Tokenised documents on disk, mapped into memory: a corpus of any size takes none, and workers share it.

    tokens.bin     int32: an id that is learned as itself, one that is not as its complement (~id, below 0)
    documents.bin  int64 pairs: where each document ends in tokens.bin, and the bytes of text its labels stand for

One number holds an id and its mask, so the two cannot come apart. ``manifest.json`` has the size and SHA-256 of every
file, and what all of it was made from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.files.cache import altered_file, map_numbers, sha256_of
from lit_efficient.losses.next_token import IGNORE

FORMAT = 2  # part of every key: raise it when the files' meaning changes
MANIFEST = "manifest.json"


class DocumentWriter:
    """Writes the documents of one split, one after the other.

    Args:
        folder: where; the files' names begin with ``split``.
        split: name of the split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self._tokens = (folder / f"{split}.tokens.bin").open("wb")
        self._documents = (folder / f"{split}.documents.bin").open("wb")
        self._end = 0

    def add(self, document: Encoded) -> None:
        """Append a document."""
        self._end += len(document.ids)
        learned = document.trained[1:]
        self._tokens.write(np.where(document.trained, document.ids, ~document.ids).astype(np.int32).tobytes())
        self._documents.write(np.array([self._end, document.num_bytes[1:][learned].sum()], np.int64).tobytes())

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._documents.close()


class Documents:
    """The documents of one split, read-only.

    Args:
        folder: where they were written.
        split: name of the split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        table = map_numbers(folder / f"{split}.documents.bin", np.int64).reshape(-1, 2)
        self._tokens = map_numbers(folder / f"{split}.tokens.bin", np.int32)
        self._ends = table[:, 0]
        self.num_bytes = table[:, 1]
        """Bytes of text that each document's labels stand for, ``[D]``."""
        self.lengths = np.diff(self._ends, prepend=0)
        """Tokens of each document, ``[D]``."""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels ``[n]`` int64 of a document; labels are not shifted, and `IGNORE` where nothing is learned.

        The first label is ignored as well: no token of the document comes before it.
        """
        stop = int(self._ends[index])
        stored = self._tokens[stop - int(self.lengths[index]) : stop].astype(np.int64)
        ids = np.where(stored < 0, ~stored, stored)
        labels = np.where(stored < 0, IGNORE, stored)
        labels[:1] = IGNORE
        return ids, labels


def labels_of(document: Encoded) -> np.ndarray:
    """Unshifted labels ``[n]`` of a document that was not stored; as `Documents` gives them."""
    labels = np.where(document.trained, document.ids, IGNORE)
    labels[:1] = IGNORE
    return labels


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest over all files in ``folder``, with ``about`` in it as it is."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {path.relative_to(folder).as_posix(): [path.stat().st_size, sha256_of(path)] for path in files}
    manifest = {"format": FORMAT, "byteorder": sys.byteorder, "files": listed, **about}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that was found sound."""
    return dict(json.loads((folder / MANIFEST).read_text("utf-8")))


def problem(folder: Path, thorough: bool = True) -> str | None:
    """What is wrong with a folder, in one sentence; None if nothing is.

    Args:
        folder: the folder.
        thorough: compare contents (about 1 s a GB), not only sizes.
    """
    try:
        manifest = read_manifest(folder)
        if (manifest["format"], manifest["byteorder"]) != (FORMAT, sys.byteorder):
            return f"{MANIFEST} is of another format or machine."
        listed = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable."
    return altered_file(folder, listed, thorough)

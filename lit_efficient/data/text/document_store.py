"""Tokenised documents on disk, memory-mapped: a corpus of any size takes no memory, and workers share it.

    tokens.bin     int32: an id that contributes to the loss as itself, any other id as its complement (~id, below 0)
    documents.bin  int64 [D, 5]: the facts of each document, see `truncation.facts`
    bytes.bin      int32: bytes of text that each token stands for; of validation documents only
    images.jsonl   text and images of each conversation, for a processor; the places of its lines are in images.bin

One number holds an id and its mask, so the two cannot get out of step. Documents are stored whole and cut when they are
read, so the cache does not depend on ``max_length``.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.data.text.message_images import PicturedText
from lit_efficient.data.text.truncation import Pieces, facts
from lit_efficient.files.cache import map_numbers
from lit_efficient.losses.next_token import IGNORE

# Part of every key; raise it when the meaning of the files changes.
FORMAT = 8


class DocumentWriter:
    """Writes documents, one after the other. For the name "val" the bytes of each token are written, too."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = ExitStack()
        self._tokens = self._files.enter_context((folder / f"{name}.tokens.bin").open("wb"))
        self._documents = self._files.enter_context((folder / f"{name}.documents.bin").open("wb"))
        self._bytes = None
        if name == "val":
            self._bytes = self._files.enter_context((folder / f"{name}.bytes.bin").open("wb"))
        self._place = folder / name
        self._lines: IO[bytes] | None = None
        self._ends: IO[bytes] | None = None

    def add(self, document: Encoded) -> None:
        """Append a document."""
        # ~id is below 0 for every id, also for 0.
        stored = np.where(document.trained, document.ids, ~document.ids)
        self._tokens.write(stored.astype(np.int32).tobytes())
        self._documents.write(np.array(facts(document), np.int64).tobytes())
        if self._bytes is not None:
            self._bytes.write(document.num_bytes.astype(np.int32).tobytes())
        if document.pictured is not None:
            self._add_images(document.pictured)

    def _add_images(self, row: PicturedText) -> None:
        if self._lines is None or self._ends is None:
            self._lines = self._files.enter_context(self._place.with_suffix(".images.jsonl").open("wb"))
            self._ends = self._files.enter_context(self._place.with_suffix(".images.bin").open("wb"))
        images = [{"base64": b64encode(i).decode()} if isinstance(i, bytes) else {"path": i} for i in row.images]
        self._lines.write(json.dumps({"text": row.text, "images": images, "sizes": dict(row.sizes)}).encode() + b"\n")
        self._ends.write(np.array([self._lines.tell()], np.int64).tobytes())

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


class Documents:
    """Stored documents, read-only."""

    def __init__(self, folder: Path, name: str) -> None:
        self.facts = map_numbers(folder / f"{name}.documents.bin", np.int64).reshape(-1, 5)
        self._tokens = map_numbers(folder / f"{name}.tokens.bin", np.int32)
        sizes = folder / f"{name}.bytes.bin"
        self._bytes = map_numbers(sizes, np.int32) if sizes.exists() else None
        self._ends: np.ndarray | None = None
        if (folder / f"{name}.images.bin").exists():
            self._lines = map_numbers(folder / f"{name}.images.jsonl", np.uint8)
            self._ends = map_numbers(folder / f"{name}.images.bin", np.int64)
        self._starts = np.cumsum(self.facts[:, 0]) - self.facts[:, 0]

    def piece(self, pieces: Pieces, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return a piece.

        Returns:
            Ids [n] int64; labels [n] int64, not shifted, `IGNORE` for the first token and for tokens without loss; and
            the bytes of text that the labels stand for (0 if they are not stored).
        """
        place = self._place(pieces, index)
        stored = self._tokens[place].astype(np.int64)
        ids = np.where(stored < 0, ~stored, stored)
        labels = np.where(stored < 0, IGNORE, stored)
        labels[:1] = IGNORE
        size = 0
        if self._bytes is not None:
            size = int(self._bytes[place][labels != IGNORE].sum())
        return ids, labels, size

    def pictured(self, document: int) -> PicturedText | None:
        """Return text and images of a conversation; None without a processor."""
        if self._ends is None:
            return None
        begin = int(self._ends[document - 1]) if document else 0
        row = json.loads(self._lines[begin : int(self._ends[document])].tobytes())
        images = tuple(one["path"] if "path" in one else b64decode(one["base64"]) for one in row["images"])
        return PicturedText(row["text"], images, row["sizes"])

    def whole(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [n] int64 of a document, and which of them are marked [n] bool."""
        begin = int(self._starts[index])
        stored = self._tokens[begin : begin + int(self.facts[index, 0])].astype(np.int64)
        return np.where(stored < 0, ~stored, stored), stored >= 0

    def count_trained(self, pieces: Pieces) -> int:
        """Return the number of tokens in pieces that contribute to the loss."""
        length, _, _, trained, cuttable = (column[pieces.document] for column in self.facts.T)
        is_whole = pieces.lengths == length
        count = int(trained[is_whole].sum())
        # All tokens of a text but the first.
        count += int((pieces.lengths - 1)[(cuttable == 1) & ~is_whole].sum())
        for index in np.flatnonzero((cuttable == 0) & ~is_whole).tolist():
            stored = self._tokens[self._place(pieces, index)][1:]
            count += int((stored >= 0).sum())
        return count

    def _place(self, pieces: Pieces, index: int) -> slice:
        begin = int(self._starts[pieces.document[index]])
        return slice(begin + int(pieces.start[index]), begin + int(pieces.stop[index]))


def labels_of(document: Encoded, start: int, stop: int) -> np.ndarray:
    """Return the unshifted labels [n] of a piece of a document that is not stored, as `Documents.piece` does."""
    labels = np.where(document.trained[start:stop], document.ids[start:stop], IGNORE)
    labels[:1] = IGNORE
    return labels

"""Tokenised documents on disk, mapped into memory: a corpus of any size takes none, and workers share it.

    tokens.bin     int32: an id that is learned as itself, one that is not as its complement (~id, below 0)
    documents.bin  int64 [D, 5]: what `truncation.facts` says of each document
    bytes.bin      int32: bytes of text that each token stands for, of validation documents alone

One number holds an id and its mask, so the two cannot come apart. Documents are stored whole, and cut when they are
read: ``max_length`` is no part of what is stored.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.data.text.truncation import Pieces, facts
from lit_efficient.files.cache import map_numbers
from lit_efficient.losses.next_token import IGNORE

FORMAT = 5  # part of every key: raise it when the files' meaning changes


class DocumentWriter:
    """Writes documents, one after the other; for "val" the bytes of each token, too."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = ExitStack()
        parts = ("tokens", "documents", *(["bytes"] if name == "val" else []))
        self._open = {part: self._files.enter_context((folder / f"{name}.{part}.bin").open("wb")) for part in parts}

    def add(self, document: Encoded) -> None:
        """Append a document."""
        stored = np.where(document.trained, document.ids, ~document.ids)
        self._open["tokens"].write(stored.astype(np.int32).tobytes())
        self._open["documents"].write(np.array(facts(document), np.int64).tobytes())
        if "bytes" in self._open:
            self._open["bytes"].write(document.num_bytes.astype(np.int32).tobytes())

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
        self._starts = np.cumsum(self.facts[:, 0]) - self.facts[:, 0]

    def piece(self, pieces: Pieces, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids and labels ``[n]`` int64 of a piece, and the bytes of text that its labels stand for (0 if not stored).

        Labels are not shifted, and `IGNORE` where nothing is learned. The first one is ignored as well: no token comes
        before it.
        """
        place = self._place(pieces, index)
        stored = self._tokens[place].astype(np.int64)
        ids = np.where(stored < 0, ~stored, stored)
        labels = np.where(stored < 0, IGNORE, stored)
        labels[:1] = IGNORE
        size = 0 if self._bytes is None else int(self._bytes[place][labels != IGNORE].sum())
        return ids, labels, size

    def count_trained(self, pieces: Pieces) -> int:
        """How many tokens of pieces are learned."""
        length, _, _, trained, cuttable = (column[pieces.document] for column in self.facts.T)
        whole, parts = pieces.lengths == length, cuttable == 1
        scanned = (self._tokens[self._place(pieces, i)][1:] for i in np.flatnonzero(~whole & ~parts).tolist())
        known = trained[whole].sum() + (pieces.lengths - 1)[parts & ~whole].sum()
        return int(known) + sum(int((stored >= 0).sum()) for stored in scanned)

    def _place(self, pieces: Pieces, index: int) -> slice:
        begin = int(self._starts[pieces.document[index]])
        return slice(begin + int(pieces.start[index]), begin + int(pieces.stop[index]))


def labels_of(document: Encoded, start: int, stop: int) -> np.ndarray:
    """Unshifted labels ``[n]`` of a piece of a document that was not stored; as `Documents` gives them."""
    labels = np.where(document.trained[start:stop], document.ids[start:stop], IGNORE)
    labels[:1] = IGNORE
    return labels

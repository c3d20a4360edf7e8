"""What becomes of documents that are longer than the model reads: nothing is cut without being counted.

A text of which all is learned is cut into pieces that overlap by one token, so that every token but the first is
predicted once. A conversation loses its end, its beginning, or itself; one without anything left to learn is dropped.
All of it follows from five numbers of each document, so that documents can be stored whole and cut for any length.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_efficient.data.text.chat_tokens import Encoded

Side = Literal["right", "left", "drop"]
TooLong = Literal["drop", "left"]


@dataclass
class Counts:
    """What is left of a split's rows and what is lost. All are numbers of what they are called."""

    truncated: int = 0
    dropped: int = 0
    tokens_lost: int = 0
    cut_into_pieces: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0


def facts(document: Encoded) -> tuple[int, int, int, int, int]:
    """Of a document: its length, the first and the last token that is learned, their number, and if it is cuttable.

    The first token does not count as learned, for nothing predicts it. The first learned one is the length if there is
    none.
    """
    length, learned = len(document.ids), 1 + np.flatnonzero(document.trained[1:])
    first, last = (int(learned[0]), int(learned[-1])) if len(learned) else (length, 0)
    return length, first, last, len(learned), int(document.cuttable)


@dataclass(frozen=True)
class Pieces:
    """Which tokens of which documents are left, in order."""

    document: np.ndarray  # number of the document ``[P]``; all three are int32, of which a corpus may have very many
    start: np.ndarray  # its first token that is left ``[P]``
    stop: np.ndarray  # where that ends ``[P]``

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each ``[P]``."""
        return self.stop - self.start


def cut(documents: np.ndarray, max_length: int, side: Side, counts: Counts) -> Pieces:
    """Make documents fit.

    Args:
        documents: the `facts` of each ``[D, 5]``.
        max_length: most tokens of a piece, at least 2.
        side: where a conversation that is too long is cut; ``drop`` leaves it out.
        counts: what happens is added to it, but for ``trained``.

    Returns:
        The pieces, each with something to learn after its first token (which nothing predicts).
    """
    length, first, last, _, cuttable = documents.T
    split = (length > max_length) & (cuttable == 1)
    truncated = (length > max_length) & (cuttable == 0)
    number = np.where(split, -(-(length - 1) // (max_length - 1)), np.where(truncated & (side == "drop"), 0, 1))
    of = np.repeat(np.arange(len(documents)), number)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number)) * (max_length - 1)
    if side == "left":
        start += np.where(truncated, length - max_length, 0)[of]
    stop = np.minimum(start + max_length, length[of])
    kept = np.where(start == 0, first[of] < stop, last[of] > start)
    dropped = np.bincount(of[kept], minlength=len(documents)) == 0
    counts.cut_into_pieces += int(split.sum())
    counts.truncated += int(truncated.sum())
    counts.dropped += int(dropped.sum())
    counts.tokens_lost += int(
        (length - max_length * (side != "drop"))[truncated].sum() + (stop - start)[dropped[of]].sum()
    )
    counts.documents += int(kept.sum())
    counts.tokens += int((stop - start)[kept].sum())
    return Pieces(*(values[kept].astype(np.int32) for values in (of, start, stop)))


def cut_pairs(chosen: np.ndarray, rejected: np.ndarray, max_length: int, too_long: TooLong) -> tuple[Pieces, Pieces]:
    """Make pairs fit, without touching an answer.

    Args:
        chosen: the `facts` of the preferred documents ``[D, 5]``.
        rejected: those of the others ``[D, 5]``.
        max_length: most tokens of each.
        too_long: ``left`` cuts the same number of tokens off the beginning of both, so that they go on having the same
            prompt; ``drop`` leaves the pair out.

    Returns:
        What is left of both sides, pair by pair. Also left out is a pair of which ``left`` would have to cut into an
        answer: one token before the first that is learned has to stay, for it predicts it.
    """
    excess = np.maximum(np.maximum(chosen[:, 0], rejected[:, 0]) - max_length, 0)
    answers = np.minimum(chosen[:, 1], rejected[:, 1])
    kept = np.flatnonzero((excess == 0) | ((excess < answers) & (too_long == "left")))
    left = [(kept, excess[kept], side[kept, 0]) for side in (chosen, rejected)]
    of_chosen, of_rejected = (Pieces(*(values.astype(np.int32) for values in side)) for side in left)
    return of_chosen, of_rejected

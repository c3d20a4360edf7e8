"""Cutting of documents that are longer than the model reads. Everything that is lost is counted.

A text that contributes to the loss as a whole is cut into pieces that overlap by one token, so that every token but the
first is predicted once. A conversation loses its end or its beginning, or is dropped. A document with nothing left to
learn is dropped. All of it follows from five numbers of each document, so whole documents can be stored and cut for any
length.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_efficient.data.text.chat_tokens import Encoded

Side = Literal["right", "left", "drop"]
TooLong = Literal["drop", "left"]


@dataclass
class Counts:
    """Numbers of documents and tokens of a split that are left, cut or lost."""

    truncated: int = 0  # documents
    dropped: int = 0  # documents
    tokens_lost: int = 0
    cut_into_pieces: int = 0  # documents
    documents: int = 0  # pieces that are left
    tokens: int = 0
    trained: int = 0  # tokens that contribute to the loss


def facts(document: Encoded) -> tuple[int, int, int, int, int]:
    """Return length, first and last token with loss, number of tokens with loss, and 1 if the document is cuttable.

    The first token of a document has no loss, because nothing predicts it. If no token has, the first one is the length
    and the last one 0.
    """
    length = len(document.ids)
    trained = 1 + np.flatnonzero(document.trained[1:])
    if not len(trained):
        return length, length, 0, 0, int(document.cuttable)
    return length, int(trained[0]), int(trained[-1]), len(trained), int(document.cuttable)


@dataclass(frozen=True)
class Pieces:
    """Tokens of documents that are left, in order. The arrays are int32, because a corpus may have very many pieces."""

    document: np.ndarray  # number of the document [P]
    start: np.ndarray  # first token of the piece [P]
    stop: np.ndarray  # token after the last [P]

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece [P]."""
        return self.stop - self.start


def _pieces(document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Pieces:
    return Pieces(document.astype(np.int32), start.astype(np.int32), stop.astype(np.int32))


def cut(documents: np.ndarray, max_length: int, side: Side, counts: Counts) -> Pieces:
    """Cut documents to a length.

    Args:
        documents: `facts` of each document [D, 5].
        max_length: Largest number of tokens of a piece, at least 2.
        side: Side at which a long conversation is cut. ``drop`` leaves it out.
        counts: Counts to add to, except ``trained``.

    Returns:
        The pieces. Each has a token with loss after its first token, which nothing predicts.
    """
    length, first, last, _, cuttable = documents.T
    split = (length > max_length) & (cuttable == 1)
    truncated = (length > max_length) & (cuttable == 0)
    number = np.ones(len(documents), dtype=np.int64)  # pieces of each document
    # Neighbouring pieces share one token: the last token of a piece predicts nothing in it, so it begins the next.
    number[split] = -(-(length[split] - 1) // (max_length - 1))
    if side == "drop":
        number[truncated] = 0
    of = np.repeat(np.arange(len(documents)), number)  # document of each piece
    # Number of the piece in its document.
    place = np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number)
    start = place * (max_length - 1)
    if side == "left":
        start += np.where(truncated, length - max_length, 0)[of]
    stop = np.minimum(start + max_length, length[of])
    # A piece counts only if a token with loss follows its first token.
    kept = np.where(start == 0, first[of] < stop, last[of] > start)
    dropped = np.bincount(of[kept], minlength=len(documents)) == 0
    lost = length if side == "drop" else length - max_length
    counts.cut_into_pieces += int(split.sum())
    counts.truncated += int(truncated.sum())
    counts.dropped += int(dropped.sum())
    counts.tokens_lost += int(lost[truncated].sum() + (stop - start)[dropped[of]].sum())
    counts.documents += int(kept.sum())
    counts.tokens += int((stop - start)[kept].sum())
    return _pieces(of[kept], start[kept], stop[kept])


def cut_pairs(chosen: np.ndarray, rejected: np.ndarray, max_length: int, too_long: TooLong) -> tuple[Pieces, Pieces]:
    """Cut pairs to a length without cutting an answer.

    Args:
        chosen: `facts` of the chosen documents [D, 5].
        rejected: `facts` of the rejected documents [D, 5].
        max_length: Largest number of tokens of a document.
        too_long: ``left`` cuts the same number of tokens off the beginning of both documents, so that they keep a
            common prompt. ``drop`` leaves a long pair out.

    Returns:
        The pieces of both sides, pair by pair. A pair is also left out if ``left`` would have to cut into an answer.
        The token before the first token with loss has to stay, because it predicts that token.
    """
    # Both sides lose the same number of tokens, or their prompts would differ.
    excess = np.maximum(np.maximum(chosen[:, 0], rejected[:, 0]) - max_length, 0)
    answers = np.minimum(chosen[:, 1], rejected[:, 1])
    fits = excess == 0
    if too_long == "left":
        fits |= excess < answers
    kept = np.flatnonzero(fits)
    return _pieces(kept, excess[kept], chosen[kept, 0]), _pieces(kept, excess[kept], rejected[kept, 0])

"""What becomes of a document that is longer than the model reads: nothing is cut without being counted.

A text of which all is learned is cut into pieces that overlap by one token, so that every token but the first is
predicted once. A conversation loses its end, its beginning, or itself; one without anything left to learn is dropped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lit_efficient.data.text.chat_tokens import Encoded

Side = Literal["right", "left", "drop"]


@dataclass
class Counts:
    """What a split holds and what it lost. All are numbers of what they are called."""

    rows: int = 0
    malformed: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens_lost: int = 0
    cut_into_pieces: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    turns: int = 0
    ended: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)


def fit(document: Encoded, max_length: int, side: Side, counts: Counts) -> list[Encoded]:
    """Make a document fit.

    Args:
        document: its tokens.
        max_length: most tokens of a piece, at least 2.
        side: where a conversation that is too long is cut; ``drop`` leaves it out.
        counts: what happens is added to it.

    Returns:
        The pieces, each with something to learn after its first token (which nothing predicts); none if it was dropped.
    """
    length = len(document.ids)
    pieces = [document]
    if length > max_length and document.cuttable:
        counts.cut_into_pieces += 1
        pieces = [_part(document, at, at + max_length) for at in range(0, length - 1, max_length - 1)]
    elif length > max_length:
        counts.truncated += 1
        counts.tokens_lost += length if side == "drop" else length - max_length
        begin = length - max_length if side == "left" else 0
        pieces = [] if side == "drop" else [_part(document, begin, begin + max_length)]
    kept = [piece for piece in pieces if piece.trained[1:].any()]
    if not kept:
        counts.dropped += 1
        counts.tokens_lost += sum(len(piece.ids) for piece in pieces)
    for piece in kept:
        counts.documents += 1
        counts.tokens += len(piece.ids)
        counts.trained += int(piece.trained[1:].sum())
    return kept


def _part(document: Encoded, start: int, stop: int) -> Encoded:
    window = slice(start, stop)
    return replace(
        document, ids=document.ids[window], trained=document.trained[window], num_bytes=document.num_bytes[window]
    )

"""A loader whose batches are handed out in pieces, of which every one is a batch, until so many have been.

pieces of a batch = those of the first stage (end, pieces) with given < end;  1 after the last
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lit_efficient.mechanisms.metering import samples_of
from lit_efficient.mechanisms.moving import take_rows


def pieces_of(batch: Any, count: int) -> list[Any]:
    """A batch in so many parts, one after the other, of equal size but for the last ones.

    Args:
        batch: Tensors whose first dimension is that of the batch's first one are cut, and lists that are as long;
            whatever else there is goes with each part.
        count: How many; where the rows do not suffice the last parts are ``None``.

    Example:
        >>> import torch
        >>> [piece["x"].tolist() for piece in pieces_of({"x": torch.arange(4), "rate": 0.5}, 2)]
        [[0, 1], [2, 3]]
    """
    rows = samples_of(batch)
    size = -(-rows // count)
    starts = range(0, count * size, size) if rows else [0] * count
    return [take_rows(batch, slice(start, start + size), rows) if start < rows else None for start in starts]


def pieces_in(batches: int, given: int, stages: Sequence[tuple[int, int]]) -> int:
    """How many pieces so many batches give after so many have been given.

    Args:
        batches: All that come.
        given: Pieces before them.
        stages: For each stage the number of pieces at which it ends, and how many a batch has in it.

    Example:
        >>> pieces_in(4, 0, [(5, 4)])  # the second batch begins within the stage, and is cut as the first
        10
    """
    before = given
    for end, count in stages:
        cut = min(batches, -(-max(0, end - given) // count))
        batches, given = batches - cut, given + cut * count
    return given + batches - before


class PiecewiseLoader:
    """A loader's batches in pieces; attributes that it lacks are the loader's.

    Its state is the loader's before the batch that is being handed out, and the numbers of pieces given.

    Args:
        loader: Any iterable with a length.
        stages: As for :func:`pieces_in`; ends ascend.
    """

    def __init__(self, loader: Any, stages: Sequence[tuple[int, int]]) -> None:
        self.loader = loader
        self.stages = stages
        self.given = 0  # pieces, in all epochs
        self._before = 0  # of them before this epoch
        self._piece = 0  # of the batch that is being handed out; 0: all of it has been
        self._state: dict[str, Any] = {}  # the loader's before that batch

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def begin_epoch(self) -> None:
        """Count the pieces of an epoch that begins."""
        self._before, self._piece = self.given, 0

    def __len__(self) -> int:
        return pieces_in(len(self.loader), self._before, self.stages)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._state, first = self._inner_state(), self._piece
            begun = self.given - first  # pieces when the batch's first one was given
            batch = next(batches, self)
            if batch is self:
                return
            count = next((count for end, count in self.stages if begun < end), 1)
            for number, piece in enumerate(pieces_of(batch, count) if count > 1 else [batch]):
                if number >= first:
                    self.given += 1
                    self._piece = (number + 1) % count
                    yield piece

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, which a run without pieces can go on from, and where this stands in it."""
        inner = self._state if self._piece else self._inner_state()
        return {**inner, "pieces": {"given": self.given, "before": self._before, "piece": self._piece}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; with the state of a run without pieces, as if all of them had been given."""
        inner = {key: value for key, value in state.items() if key != "pieces"}
        known = state.get("pieces") or {"given": self.stages[-1][0], "before": self.stages[-1][0], "piece": 0}
        self.given, self._before = known["given"], known["before"]
        self._piece = known["piece"] if inner else 0  # a loader without state begins with a whole batch
        if inner:
            self.loader.load_state_dict(inner)

    def _inner_state(self) -> dict[str, Any]:
        return dict(self.loader.state_dict()) if callable(getattr(self.loader, "state_dict", None)) else {}

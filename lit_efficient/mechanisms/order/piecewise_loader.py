"""Loader that yields the batches of another loader in pieces, each of which is a batch, for a number of batches.

pieces per batch = the count of the first stage (end, count) with end > pieces yielded so far;  1 after the last stage
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.metering import samples_of
from lit_efficient.mechanisms.moving import take_rows, tensors_in

_EXHAUSTED = object()


def pieces_of(batch: object, count: int) -> list[object]:
    """Split a batch into consecutive pieces of equal size, except for the last ones.

    Args:
        batch: Nested tensors and lists. Those whose first dimension is the number of samples are split. Everything else
            goes into each piece.
        count: Number of pieces. Where there are too few rows, the last pieces are ``None``.

    Raises:
        ConfigurationError: For a batch without tensors, and for objects whose rows are unknown.

    Example:
        >>> import torch
        >>> [piece["x"].tolist() for piece in pieces_of({"x": torch.arange(4), "rate": 0.5}, 2)]
        [[0, 1], [2, 3]]
    """
    rows = samples_of(batch)
    if not rows and next(tensors_in(batch), None) is None:
        raise ConfigurationError(
            f"a batch of the type {type(batch).__name__} cannot be split, because it holds no tensors in dictionaries, "
            "tuples, lists or dataclasses"
        )
    if not rows:
        return [None] * count
    size = -(-rows // count)
    pieces = []
    for start in range(0, count * size, size):
        pieces.append(take_rows(batch, slice(start, start + size), rows) if start < rows else None)
    return pieces


def pieces_in(batches: int, given: int, stages: Sequence[tuple[int, int]]) -> int:
    """Return the number of pieces into which the next batches are split.

    Args:
        batches: Number of batches to come.
        given: Number of pieces yielded before them.
        stages: Pairs (end, count): batches are split into ``count`` pieces while fewer than ``end`` have been yielded.

    Example:
        >>> pieces_in(4, 0, [(5, 4)])  # the second batch begins before the end of the stage and is split as well
        10
    """
    total = given
    for end, count in stages:
        split = min(batches, -(-max(0, end - total) // count))
        batches -= split
        total += split * count
    return total + batches - given


class PiecewiseLoader:
    """Loader that yields another loader's batches in pieces. Other attributes are the inner loader's.

    Its state is the state of the inner loader before the batch that is being yielded, and the counts of pieces.

    Args:
        loader: Any iterable with a length.
        stages: Stages as for :func:`pieces_in`, with ascending ends.
    """

    def __init__(self, loader: Any, stages: Sequence[tuple[int, int]]) -> None:
        self.loader = loader
        self.stages = stages
        self.given = 0  # pieces yielded in all epochs
        self._before = 0  # pieces yielded before this epoch
        self._piece = 0  # pieces of the present batch that have been yielded; 0 between batches
        self._state: dict[str, object] = {}  # state of the inner loader before the present batch

    def __getattr__(self, name: str) -> Any:
        # "loader" is missing while a copy or a pickle is being made; looking it up again would recurse.
        if name in ("loader", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def begin_epoch(self) -> None:
        """Begin to count the pieces of a new epoch."""
        self._before = self.given
        self._piece = 0

    def __len__(self) -> int:
        return pieces_in(len(self.loader), self._before, self.stages)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._state = self._inner_state()
            first = self._piece  # after a resume in the middle of a batch its first pieces are skipped
            given_at_batch_start = self.given - first
            batch = next(batches, _EXHAUSTED)
            if batch is _EXHAUSTED:
                return
            count = next((count for end, count in self.stages if given_at_batch_start < end), 1)
            pieces = pieces_of(batch, count) if count > 1 else [batch]
            for number, piece in enumerate(pieces[first:], first):
                self.given += 1
                self._piece = (number + 1) % count
                yield piece

    def state_dict(self) -> dict[str, Any]:
        """Return the inner loader's state, from which a run without pieces can resume, and the counts of pieces."""
        inner = self._state if self._piece else self._inner_state()
        return {**inner, "pieces": {"given": self.given, "before": self._before, "piece": self._piece}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The state of a run without pieces counts as if all stages were over."""
        inner = {key: value for key, value in state.items() if key != "pieces"}
        counts = state.get("pieces")
        if not counts:
            end_of_stages = self.stages[-1][0]
            counts = {"given": end_of_stages, "before": end_of_stages, "piece": 0}
        self.given = counts["given"]
        self._before = counts["before"]
        self._piece = 0  # a loader without a state can only begin with a whole batch
        if inner:
            self._piece = counts["piece"]
            self.loader.load_state_dict(inner)

    def _inner_state(self) -> dict[str, object]:
        if callable(getattr(self.loader, "state_dict", None)):
            return dict(self.loader.state_dict())
        return {}

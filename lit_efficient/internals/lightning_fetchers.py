"""Data fetchers of Lightning's loops: functions that see every batch, and reading one batch ahead.

``fit_loop._data_fetcher``, ``val_loop._data_fetcher``, and of a ``_DataFetcher`` ``__next__``, ``reset``, ``done`` and
``fetched``. Checked with lightning 2.6.6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_COUNTERS = ("done", "fetched")  # attributes of a fetcher that reading a batch changes


class _Passing:
    """Mix-in of a fetcher's class that calls functions for each batch."""

    asked: Callable[[], None]  # called before a batch is read
    passed: Callable[[Any], Any]  # called with a batch after it was read, and returns it
    handed: Callable[[Any], Any]  # called with a batch when the loop gets it, and returns it
    _waiting: tuple[Any, dict[str, Any]] | None = None  # batch that was read ahead, and the counters after it

    def __next__(self: Any) -> object:
        if self._waiting is None:
            item = self._read()
        else:
            item, counters = self._waiting
            self._waiting = None
            vars(self).update(counters)
        if isinstance(item, Exception):
            raise item
        batch, *place = item
        return (self.handed(batch), *place)

    def _read(self) -> object:
        self.asked()
        try:
            batch, *place = super().__next__()  # type: ignore[misc]
            return (self.passed(batch), *place)
        except Exception as error:  # StopIteration, or an error that must be raised in the step of this batch
            return error

    def reset(self) -> None:
        self._waiting = None
        super().reset()  # type: ignore[misc]


def pass_through(
    loop: Any, asked: Callable[[], None], passed: Callable[[Any], Any], handed: Callable[[Any], Any]
) -> bool:
    """Call functions for each batch of a loop.

    Args:
        loop: The loop, such as ``trainer.fit_loop``.
        asked: Called before a batch is read.
        passed: Called with a batch after it was read. Returns the batch.
        handed: Called with a batch when the loop gets it. Returns the batch.

    Returns:
        False if that is impossible, because the module takes the iterator itself.
    """
    fetcher = loop._data_fetcher
    if fetcher is None or "DataLoaderIter" in type(fetcher).__name__:
        return False
    if not isinstance(fetcher, _Passing):
        kind: Any = type(type(fetcher).__name__, (_Passing, type(fetcher)), {})
        other = kind.__new__(kind)
        vars(other).update(vars(fetcher))
        loop._data_fetcher = other  # a new object: Python refuses to assign `__class__` of a fetcher
        fetcher = other
    fetcher.asked = asked
    fetcher.passed = passed
    fetcher.handed = handed
    return True


def read_ahead(trainer: Trainer) -> object:
    """Read the next batch of a fit now, and return the states of the loaders before it (``None`` without a batch)."""
    fetcher = trainer.fit_loop._data_fetcher
    if not isinstance(fetcher, _Passing) or fetcher._waiting is not None or fetcher.done:
        return None
    states = copy.deepcopy(trainer.fit_loop._combined_loader._state_dicts())
    before = {name: getattr(fetcher, name) for name in _COUNTERS}
    item = fetcher._read()
    fetcher._waiting = item, {name: getattr(fetcher, name) for name in _COUNTERS}
    vars(fetcher).update(before)
    return states


def put_states(checkpoint: dict[str, Any], states: object) -> None:
    """Replace the states of the training loaders in a checkpoint, if it has any: ``fit_loop.on_save_checkpoint``."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if "combined_loader" in state:
        state["combined_loader"] = states

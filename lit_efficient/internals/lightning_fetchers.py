"""What hands batches to Lightning's loops: each one may pass through a function, and the next one may be read ahead.

``fit_loop._data_fetcher``, ``val_loop._data_fetcher``, and of a ``_DataFetcher`` ``__next__``, ``reset``, ``done`` and
``fetched``. Checked with lightning 2.6.6.
"""

import copy
from collections.abc import Callable
from typing import Any

_KEPT = ("done", "fetched")


class _Passing:
    """In front of a fetcher's own class."""

    asked: Callable[[], None]  # called before a batch is read
    passed: Callable[[Any], Any]  # what is done to it then
    handed: Callable[[Any], Any]  # and when the loop gets it
    _waiting: tuple[Any, tuple[Any, ...]] | None = None  # what was read ahead, and how the fetcher stands after it

    def __next__(self: Any) -> Any:
        if self._waiting is None:
            item = self._read()
        else:
            (item, after), self._waiting = self._waiting, None
            for name, value in zip(_KEPT, after):
                setattr(self, name, value)
        if isinstance(item, Exception):
            raise item
        batch, *place = item
        return (self.handed(batch), *place)

    def _read(self: Any) -> Any:
        self.asked()
        try:
            batch, *place = super().__next__()  # type: ignore[misc]
            return (self.passed(batch), *place)
        except Exception as error:  # the end, or what a batch that was read ahead must not do to the step before
            return error

    def reset(self) -> None:
        self._waiting = None
        super().reset()  # type: ignore[misc]


def pass_through(
    loop: Any, asked: Callable[[], None], passed: Callable[[Any], Any], handed: Callable[[Any], Any]
) -> bool:
    """Call functions before a batch of a loop is read, with it, and when it is handed out; the latter two return it.

    Returns:
        Whether they do: not those of a module that takes the iterator itself.
    """
    fetcher = loop._data_fetcher
    if fetcher is None or "DataLoaderIter" in type(fetcher).__name__:
        return False
    if not isinstance(fetcher, _Passing):
        kind: Any = type(type(fetcher).__name__, (_Passing, type(fetcher)), {})
        other = kind.__new__(kind)
        vars(other).update(vars(fetcher))
        loop._data_fetcher = fetcher = other  # Python lets no object of such a class change it
    fetcher.asked, fetcher.passed, fetcher.handed = asked, passed, handed
    return True


def read_ahead(trainer: Any) -> Any:
    """Read the next batch of a fit now, if there is one, and return the loaders' states without it."""
    fetcher = trainer.fit_loop._data_fetcher
    if not isinstance(fetcher, _Passing) or fetcher._waiting is not None or fetcher.done:  # type: ignore[attr-defined]
        return None
    states = copy.deepcopy(trainer.fit_loop._combined_loader._state_dicts())
    kept = [getattr(fetcher, name) for name in _KEPT]
    item = fetcher._read()
    fetcher._waiting = item, tuple(getattr(fetcher, name) for name in _KEPT)
    for name, value in zip(_KEPT, kept):
        setattr(fetcher, name, value)
    return states


def put_states(checkpoint: dict[str, Any], states: Any) -> None:
    """Put states of the training loaders into a checkpoint that has some: ``fit_loop.on_save_checkpoint``."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if "combined_loader" in state:
        state["combined_loader"] = states

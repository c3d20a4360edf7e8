"""How a ``DataLoader`` keeps its workers, plans its batches and reads one. Checked with torch 2.13."""

import copy
import traceback
from typing import Any, TypeVar

from torch.utils.data import DataLoader

_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def copied(loader: _Loader) -> _Loader:
    """A copy with the same parts; running workers stay the original's: ``DataLoader._iterator``."""
    other = copy.copy(loader)
    vars(other)["_iterator"] = None
    return other


def set_loading(loader: _Loader, workers: int, prefetch: int | None, pin: bool) -> _Loader:
    """Let a loader that has not begun read in another way, and return it; ``DataLoader`` itself refuses some."""
    vars(loader).update(num_workers=workers, prefetch_factor=prefetch, pin_memory=pin)
    if not workers:
        vars(loader).update(timeout=0, persistent_workers=False)
    return loader


def fetcher(loader: DataLoader[Any]) -> Any:
    """What a loader without workers reads with: ``fetch(indices)`` is a batch; ``_MapDatasetFetcher``."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    return _MapDatasetFetcher(loader.dataset, loader.batch_sampler is not None, loader.collate_fn, False)


def broke_off(error: BaseException) -> bool:
    """Whether a worker ended while it handed over a batch: ``_MultiProcessingDataLoaderIter._try_get_data``.

    A worker that is killed closes its connections a moment before it counts as ended, and only what has ended does
    torch tell by a sentence of its own.
    """
    if not isinstance(error, (OSError, EOFError)) or getattr(error, "filename", None) is not None:
        return False
    return any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))


class PlannedLoader(DataLoader[Any]):
    """A ``DataLoader`` that says itself what to fetch, with workers and without: ``DataLoader._index_sampler``."""

    def plan(self, indices: Any) -> Any:
        """What to fetch, batch by batch; ``indices`` is what the samplers give."""
        return indices

    @property
    def _index_sampler(self) -> Any:
        return self.plan(super()._index_sampler)

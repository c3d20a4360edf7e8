"""Private parts of ``DataLoader``: workers, index sampler and fetcher. Checked with torch 2.13."""

import copy
import traceback
from typing import Any, TypeVar

from torch.utils.data import DataLoader

_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def copied(loader: _Loader) -> _Loader:
    """Copy a loader without its running workers: ``DataLoader._iterator``."""
    other = copy.copy(loader)
    vars(other)["_iterator"] = None
    return other


def set_loading(loader: _Loader, workers: int, prefetch: int | None, pin: bool) -> _Loader:
    """Change how a loader reads before its first use, and return it. ``DataLoader`` forbids some of these changes."""
    vars(loader).update(num_workers=workers, prefetch_factor=prefetch, pin_memory=pin)
    if not workers:
        vars(loader).update(timeout=0, persistent_workers=False)
    return loader


def fetcher(loader: DataLoader[object]) -> Any:
    """Return an object whose ``fetch(indices)`` reads a batch without workers: ``_MapDatasetFetcher``."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    return _MapDatasetFetcher(loader.dataset, loader.batch_sampler is not None, loader.collate_fn, False)


def broke_off(error: BaseException) -> bool:
    """Return whether an error means that a worker was killed while it sent a batch.

    A killed worker closes its connections shortly before it counts as dead, and torch only explains errors of dead
    workers: ``_MultiProcessingDataLoaderIter._try_get_data``.
    """
    if not isinstance(error, (OSError, EOFError)) or getattr(error, "filename", None) is not None:
        return False
    return any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))


class PlannedLoader(DataLoader[Any]):
    """``DataLoader`` that can change the indices that are fetched: ``DataLoader._index_sampler``."""

    def plan(self, indices: object) -> Any:
        """Return the indices to fetch, batch by batch. ``indices`` are those of the samplers."""
        return indices

    @property
    def _index_sampler(self) -> object:
        return self.plan(super()._index_sampler)

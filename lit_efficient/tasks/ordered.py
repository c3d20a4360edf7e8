"""Reading of a loader's data set in order, to compute something of each row once."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.errors import ConfigurationError


def has_order(loader: Any) -> bool:
    """Return whether a loader batches an indexed data set."""
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return indexed and loader.batch_sampler is not None


def in_order(loader: Any, who: str, way_out: str, limit: int | None = None) -> Callable[[], Iterator[Any]]:
    """Return a function that reads the data set of a loader once, in order, without changing torch's generator.

    Args:
        loader: The loader.
        who: Task and argument, for the error.
        way_out: Advice for data without an order, for the error.
        limit: Largest number of batches. ``None`` reads all.

    Raises:
        ConfigurationError: If the loader does not batch an indexed data set.
    """
    if not has_order(loader):
        raise ConfigurationError(
            f"{who} needs one DataLoader over an indexed data set, which batches it. For streams, {way_out}"
        )

    def batches() -> Iterator[Any]:
        plain = DataLoader(
            loader.dataset, loader.batch_size or 1, num_workers=loader.num_workers, collate_fn=loader.collate_fn
        )
        with torch.random.fork_rng(devices=[]):
            yield from islice(plain, limit)

    return batches

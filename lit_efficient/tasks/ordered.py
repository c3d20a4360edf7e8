"""Reading of a loader's data set in order, to compute something of each row once."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.progress import Progress


def has_order(loader: Any) -> bool:
    """Return whether a loader batches an indexed data set."""
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return indexed and loader.batch_sampler is not None


def in_order(loader: Any, who: str, way_out: str, limit: int | None = None) -> Callable[..., Iterator[Any]]:
    """Return a function that reads the data set of a loader once, in order, without changing torch's generator.

    Its argument names the work that is done with each batch, whose progress is printed. "" prints nothing.

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

    def batches(work: str = "") -> Iterator[Any]:
        size = loader.batch_size or 1
        rows = len(loader.dataset)
        if limit is not None:
            rows = min(rows, limit * size)
        plain = DataLoader(loader.dataset, size, num_workers=loader.num_workers, collate_fn=loader.collate_fn)
        with torch.random.fork_rng(devices=[]), Progress(work, "rows", rows, shown=bool(work)) as progress:
            for batch in islice(plain, limit):
                yield batch
                progress.update(min(size, rows - progress.done))

    return batches

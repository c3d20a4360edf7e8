"""Reading of a loader's data set in order, to compute something of each row once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.errors import ConfigurationError


def in_order(loader: Any, who: str, way_out: str) -> Callable[[], Iterator[Any]]:
    """Return a function that reads the data set of a loader once, in order, without changing torch's generator.

    Args:
        loader: The loader.
        who: Task and argument, for the error.
        way_out: Advice for data without an order, for the error.

    Raises:
        ConfigurationError: If the loader does not batch an indexed data set.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        raise ConfigurationError(
            f"{who} needs one DataLoader over an indexed data set, which batches it. For streams, {way_out}"
        )

    def batches() -> Iterator[Any]:
        plain = DataLoader(
            loader.dataset, loader.batch_size or 1, num_workers=loader.num_workers, collate_fn=loader.collate_fn
        )
        with torch.random.fork_rng(devices=[]):
            yield from plain

    return batches

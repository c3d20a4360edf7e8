"""Batches for memory tests: the largest samples of a dataset, collated by the loader's own functions.

    scan n samples spread over the dataset -> sort by bytes, largest first -> collate the first B of them

Where samples differ in length, a random batch says nothing about the largest memory: a later batch may need more.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_loaders import copied, fetcher
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatches, KeyedBatchSampler

Longest = Callable[[Any, int], Sequence[int]]


def sample_bytes(sample: object) -> int:
    """Return the bytes of a sample's tensors, arrays, texts, images and numbers."""
    return sum(_leaf_bytes(leaf) for leaf in tree_leaves(sample))


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, str | bytes):
        return len(leaf)
    # Containers that torch's trees do not look into: subclasses of lists and dicts, sets, and data classes.
    if isinstance(leaf, Mapping):
        return sum(sample_bytes(part) for part in leaf.values())
    if isinstance(leaf, Sequence | Set):
        return sum(sample_bytes(part) for part in leaf)
    if dataclasses.is_dataclass(leaf):
        return sum(sample_bytes(getattr(leaf, field.name, None)) for field in dataclasses.fields(leaf))
    size = getattr(leaf, "size", None)  # a picture's width and height
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        return int(np.prod(size))
    return 8


def longest_samples(dataset: Any, count: int, indices: Sequence[object] | None = None) -> list[Any]:
    """Return the indices of ``count`` samples that are spread evenly over a dataset, the largest sample first.

    Args:
        dataset: Map-style dataset. Only ``count`` samples are read.
        count: Number of samples.
        indices: Indices or keys to choose from. ``None``: all indices.
    """
    if indices is None:
        indices = range(len(dataset))
    count = min(count, len(indices))
    chosen = [indices[i * len(indices) // count] for i in range(count)]
    sizes = {index: sample_bytes(dataset[index]) for index in chosen}
    return sorted(sizes, key=lambda index: -sizes[index])


def loaders_in(loaders: object) -> list[Any]:
    """Return the loaders in a collection of loaders, in order."""
    return list(tree_leaves(getattr(loaders, "iterables", loaders)))


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples in a batch, or None if the loader has no batch size."""
    if isinstance(loader.sampler, KeyedBatchSampler):
        return loader.sampler.batch_size
    return loader.batch_size


def check_loader(loader: Any, owner: str) -> None:
    """Raise an error for a loader whose batch size cannot be changed.

    Raises:
        ConfigurationError: With the reason and the way out.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{owner}: a {type(loader).__name__} has no batch size that could be changed; use a torch DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"{owner}: the iterable dataset {type(loader.dataset).__name__} does not tell its length or its longest "
            "samples, and may batch by itself. Find the batch size with a map-style dataset"
        )
    if batch_size_of(loader) is None:
        reason = "it does not batch"
        if loader.batch_sampler is not None:
            reason = f"its {type(loader.batch_sampler).__name__} composes the batches"
        raise ConfigurationError(f"{owner}: the loader has no batch_size ({reason}). Give the loader batch_size=...")


class ProbeBatches:
    """Maker of batches of a loader's longest samples, with the loader's batch size and collate function.

    Args:
        loader: The loader.
        indices: Indices or keys of the longest samples, largest first. They are repeated to fill a larger batch.
    """

    def __init__(self, loader: DataLoader[Any], indices: Sequence[Any]) -> None:
        size = min(batch_size_of(loader) or 1, len(loader.dataset))  # type: ignore[arg-type]
        self._indices = list(itertools.islice(itertools.cycle(indices), size))
        # A loader without workers uses the same fetcher, which also reads whole batches by ``__getitems__``.
        self._fetcher = fetcher(loader)

    @staticmethod
    def find(loader: DataLoader[Any], scan: int, longest: Longest | None = None) -> list[Any]:
        """Return the indices or keys of the longest of ``scan`` samples of a loader's dataset, largest first.

        Args:
            loader: The loader. If its sampler draws from a subset, only that subset is scanned.
            scan: Number of samples to scan.
            longest: Function to use instead of :func:`longest_samples`.
        """
        keyed = None
        if isinstance(loader.sampler, KeyedBatchSampler):
            keyed = loader.sampler
        dataset: Any = loader.dataset
        if isinstance(dataset, KeyedBatches):
            dataset = dataset.dataset
        indices: list[Any]
        if longest is not None:
            indices = [int(index) for index in longest(dataset, scan)]
            if keyed:
                indices = [(index, 0) for index in indices]
        elif keyed:
            indices = longest_samples(dataset, scan, [(index, 0) for index in keyed.index])
        else:
            indices = longest_samples(dataset, scan, getattr(loader.sampler, "indices", None))
        if not indices:
            raise refusal("longest_samples(dataset, count)", "result", "at least one index", indices)
        return keyed.alike(indices) if keyed else indices

    def batch(self) -> Any:
        """Read the samples again and return them as a batch."""
        return self._fetcher.fetch(self._indices)


def with_batch_size(loader: DataLoader[object], size: int) -> DataLoader[object]:
    """Return a copy of a loader with another batch size. All other parts are the same objects."""
    other = copied(loader)
    # DataLoader forbids setting its samplers after __init__, where it checks them. The new ones are of the same kind,
    # so the checks still hold, and the instance's dictionary is written instead.
    if isinstance(loader.sampler, KeyedBatchSampler):
        vars(other)["sampler"] = loader.sampler.resized(size)
        return other
    vars(other)["batch_size"] = size
    sampler = copy.copy(loader.batch_sampler)
    if type(sampler) is not BatchSampler:
        raise ConfigurationError(
            f"{type(sampler).__name__} composes batches by itself: its batch size cannot be changed"
        )
    sampler.batch_size = size
    vars(other)["batch_sampler"] = sampler
    return other


def resize(loaders: Any, size: int) -> Any:
    """Return a collection of loaders with another batch size, see :func:`with_batch_size`."""
    if hasattr(loaders, "iterables"):  # Lightning's CombinedLoader
        other = copy.copy(loaders)
        other.flattened = [resize(loader, size) for loader in loaders.flattened]
        return other
    return tree_map_only(DataLoader, lambda loader: with_batch_size(loader, size), loaders)


def live_generators(loaders: object) -> list[torch.Generator]:
    """Return the random generators that loaders and their samplers hold."""
    generators = []
    for loader in loaders_in(loaders):
        for part in (loader, getattr(loader, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generators.append(generator)
    return generators

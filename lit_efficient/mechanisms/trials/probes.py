"""The batches to test memory with: the largest samples that a dataset has, put together by its loader's own hands.

    scan n samples spread over the dataset -> sort by bytes, largest first -> collate the first B of them

A batch at random says nothing about memory where samples differ in length: the step that fails comes hours later.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
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
    """Bytes of a sample's tensors, arrays, texts and numbers."""
    return sum(_leaf_bytes(leaf) for leaf in tree_leaves(sample))


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, str | bytes):
        return len(leaf)
    size = getattr(leaf, "size", None)  # a picture's width and height
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        return int(np.prod(size))
    return 8


def longest_samples(dataset: Any, count: int, indices: Sequence[Any] | None = None) -> list[Any]:
    """Indices (all, or the given ones or keys) of ``count`` samples, spread evenly over a dataset, the one with the
    most bytes first; no more than these are read.
    """
    known = range(len(dataset)) if indices is None else indices
    count = min(count, len(known))
    chosen = [known[i * len(known) // count] for i in range(count)]
    sizes = {index: sample_bytes(dataset[index]) for index in chosen}
    return sorted(sizes, key=lambda index: -sizes[index])


def loaders_in(loaders: Any) -> list[Any]:
    """The loaders in a collection of them, in order."""
    return list(tree_leaves(getattr(loaders, "iterables", loaders)))


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Samples a batch, of a loader whose sampler makes whole batches of keys, too."""
    return loader.sampler.batch_size if isinstance(loader.sampler, KeyedBatchSampler) else loader.batch_size


def check_loader(loader: Any, owner: str) -> None:
    """Refuse a loader that has no batch size to change.

    Raises:
        ConfigurationError: Naming the reason and the way out.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{owner}: a {type(loader).__name__} has no batch size that could be set; use a torch DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"{owner}: the iterable dataset {type(loader.dataset).__name__} cannot be asked for its longest samples "
            "nor for its length, and may batch by itself; find the size with a dataset that has indices"
        )
    if batch_size_of(loader) is None:
        kind = type(loader.batch_sampler).__name__
        raise ConfigurationError(
            f"{owner}: the loader has no batch_size "
            f"({'it does not batch' if loader.batch_sampler is None else f'{kind} decides what is in a batch'}); "
            "give the loader batch_size=..."
        )


class ProbeBatches:
    """Makes batches of a loader's longest samples, of its batch size and with its collate function.

    Indices or keys come largest first; they are repeated where the batch is larger.
    """

    def __init__(self, loader: DataLoader[Any], indices: Sequence[Any]) -> None:
        size = min(batch_size_of(loader) or 1, len(loader.dataset))  # type: ignore[arg-type]
        self._indices = list(itertools.islice(itertools.cycle(indices), size))
        # What a loader without workers uses, batched reading (``__getitems__``) included.
        self._fetcher = fetcher(loader)

    @staticmethod
    def find(loader: DataLoader[Any], scan: int, longest: Longest | None = None) -> list[Any]:
        """Indices, or keys, of the longest of ``scan`` samples of a loader's dataset, largest first.

        Where its sampler draws from a subset, only that is looked at. ``longest`` is asked in the place of
        :func:`longest_samples`.
        """
        keyed = loader.sampler if isinstance(loader.sampler, KeyedBatchSampler) else None
        dataset: Any = loader.dataset.dataset if isinstance(loader.dataset, KeyedBatches) else loader.dataset
        if longest is None:
            known = [(index, 0) for index in keyed.index] if keyed else getattr(loader.sampler, "indices", None)
            indices = longest_samples(dataset, scan, known)
        else:
            found = [int(index) for index in longest(dataset, scan)]
            indices = [(index, 0) for index in found] if keyed else found
        if not indices:
            raise refusal("longest_samples(dataset, count)", "what it returns", "at least one index", indices)
        return keyed.alike(indices) if keyed else indices

    def batch(self) -> Any:
        """A batch, read again."""
        return self._fetcher.fetch(self._indices)


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """A copy of a loader with another batch size, and with everything else the same object, its class and sampler
    included.
    """
    other = copied(loader)
    # DataLoader forbids to set these after __init__, because it could not check them again; their kinds stay.
    if isinstance(loader.sampler, KeyedBatchSampler):
        vars(other)["sampler"] = loader.sampler.resized(size)
        return other
    vars(other)["batch_size"] = size
    sampler = copy.copy(loader.batch_sampler)
    if type(sampler) is not BatchSampler:
        raise ConfigurationError(f"the batches of {type(sampler).__name__} are its own: it has no size to change")
    sampler.batch_size = size
    vars(other)["batch_sampler"] = sampler
    return other


def resize(loaders: Any, size: int) -> Any:
    """A collection of loaders with the training loaders' batch size changed, see :func:`with_batch_size`."""
    if hasattr(loaders, "iterables"):  # Lightning's CombinedLoader
        other = copy.copy(loaders)
        other.flattened = [resize(loader, size) for loader in loaders.flattened]
        return other
    return tree_map_only(DataLoader, lambda loader: with_batch_size(loader, size), loaders)


def live_generators(loaders: Any) -> list[torch.Generator]:
    """The generators that loaders and their samplers draw from, where they have their own."""
    parts = [part for loader in loaders_in(loaders) for part in (loader, getattr(loader, "sampler", None))]
    found = [getattr(part, "generator", None) for part in parts]
    return [generator for generator in found if isinstance(generator, torch.Generator)]

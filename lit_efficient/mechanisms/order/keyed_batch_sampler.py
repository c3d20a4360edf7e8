"""Batches of keys (index, variant) with one image shape each: a pure function of (seed, epoch), on any number of ranks.

    order of epoch e   = permutation of the index, hash(seed, e)
    batches of all ranks = the order, filled into one open batch for each bucket; then themselves in random order
    of many items      = a permutation of each bucket, cut into batches; then all of them in random order: see below
    rank r's part      = every num_replicas-th key of it, from the r-th on
    variant of image i = hash(seed, e, i) mod variants

So the ranks of a step have the same shape and the same number of images, and R ranks with batches of B see, step by
step, what one process with batches of R * B sees. What is cached by key and what is computed again by key are read in
the same order. Above ``INDEXED_FROM`` items a batch is computed where it is read: its bucket, and its places among that
bucket's items, which :class:`~.bucket_places.BucketPlaces` finds in the index with a byte an item.
"""

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.order.bucket_places import BucketPlaces
from lit_efficient.mechanisms.order.indexed_permutation import IndexedPermutation
from lit_efficient.mechanisms.order.resumable_sampler import INDEXED_FROM, epoch_order, mix_seed, shard

Key = tuple[int, int]
"""Index of an image in its data set, and number of its variant."""


def variant_of(seed: int, epoch: int, index: int, variants: int) -> int:
    """Which variant of an image an epoch shows, in ``[0, variants)``: a pure function of its arguments."""
    return mix_seed(seed, epoch, index) % variants if variants > 1 else 0


def fill_batches(order: Iterable[int], buckets: Any, size: int, drop_last: bool) -> Iterator[list[int]]:
    """Deal positions into batches of one bucket each, in the order of their last positions, incomplete ones last.

    ``buckets[position]`` is the bucket of a position.
    """
    opened: dict[Hashable, list[int]] = {}
    for position in order:
        batch = opened.setdefault(buckets[position], [])
        batch.append(position)
        if len(batch) == size:
            yield opened.pop(buckets[position])
    if not drop_last:
        yield from opened.values()


class KeyedBatchSampler(DistributedSampler[list[Key]]):
    """Yields batches of (index, variant), each of one bucket, as a pure function of ``(seed, epoch)``.

    Give it to :func:`keyed_loader`. Lightning then tells it the epoch and leaves it alone under DDP, because it is a
    ``DistributedSampler``; ``ExactResume`` goes on in the middle of an epoch with the same batches.

    Args:
        index: Indices of the images, each once. A ``range``, with images that are all equal, is never made a list.
        batch_size: Keys a batch, for each rank.
        bucket_of: Shape (height, width) of an image by its index: those of a batch are equal. ``None``: all are equal.
        variants: How many variants each image has; an epoch shows one of them, see :func:`variant_of`.
        seed: Seed of the order and of the variants.
        shuffle: Permute images and batches again in each epoch. Without, images are in the order of ``index`` within
            their bucket, and so are the batches by their last image.
        drop_last: Leave incomplete batches out. Without, they come with what is left, filled up to equal length on all
            ranks with images of their own.
        num_replicas: Number of ranks. ``None`` asks the process group, one without it; see :func:`data_parallel_part`.
        rank: Which of them. ``None`` asks the process group, 0 without it.

    Raises:
        ConfigurationError: If an argument is out of range, or ``drop_last`` would never show the images of a bucket.
    """

    def __init__(
        self,
        index: Sequence[int],
        batch_size: int,
        bucket_of: Callable[[int], Hashable] | None = None,
        variants: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if isinstance(index, Sampler):  # what Lightning would do to a batch sampler under DDP
            allowed = "a sequence of integers (Lightning replaces a batch sampler under DDP: use keyed_loader())"
            raise refusal("KeyedBatchSampler", "index", allowed, type(index).__name__)
        grouped = distributed.is_available() and distributed.is_initialized()
        num_replicas = num_replicas if num_replicas is not None else distributed.get_world_size() if grouped else 1
        rank = rank if rank is not None else distributed.get_rank() if grouped else 0
        least = {"batch_size": (batch_size, 1), "variants": (variants, 1), "seed": (seed, 0)}
        for name, (value, smallest) in {**least, "num_replicas": (num_replicas, 1)}.items():
            check_number("KeyedBatchSampler", name, value, least=smallest, whole=True)
        check_number("KeyedBatchSampler", "rank", rank, least=0, below=num_replicas, whole=True)
        if not len(index):
            raise refusal("KeyedBatchSampler", "index", "a sequence of at least one image", list(index))
        super().__init__(index, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.index: Sequence[int] = index if isinstance(index, range) else list(index)
        self.batch_size = batch_size
        self.variants = variants
        self.round = 0  # a loader that is begun again within an epoch gets another order
        self.first = 0  # batches that the next pass leaves out
        self.indexed = True  # false to go on in the order of a run that drew all of it
        buckets = BucketPlaces(map(bucket_of, self.index), len(self.index)) if bucket_of else None
        self._buckets = buckets if buckets is not None and len(buckets.counts) > 1 else None
        self._count()

    @property
    def computes_order(self) -> bool:
        """Whether the order is computed where it is read."""
        return self.shuffle and self.indexed and len(self.index) > INDEXED_FROM

    def _count(self) -> None:
        counts, whole, drop_last = self._counts(), self.batch_size * self.num_replicas, self.drop_last
        if drop_last and (never := {bucket: count for bucket, count in counts.items() if count < whole}):
            listed = ", ".join(f"{bucket}: {count}" for bucket, count in sorted(never.items(), key=str)[:5])
            raise ConfigurationError(
                f"KeyedBatchSampler: drop_last would leave out all images of buckets with fewer than the {whole} of a "
                f"step ({listed}). Use drop_last=False or a smaller batch_size."
            )
        each = (count // whole if drop_last else math.ceil(count / whole) for count in counts.values())
        self._ends = list(accumulate(each))  # of the batches of each bucket, among those of all
        self._length = self._ends[-1]

    def _counts(self) -> Mapping[Hashable, int]:
        return {None: len(self.index)} if self._buckets is None else self._buckets.counts

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first, self.first = self.epoch, self.first, 0  # a later set_epoch is for later passes
        for batch in self._batches((self.seed, epoch, self.round), first):
            part = shard(batch, self.rank, self.num_replicas, drop_last=False)
            yield [(i, variant_of(self.seed, epoch, i, self.variants)) for i in (self.index[p] for p in part)]

    def _batches(self, key: tuple[int, int, int], first: int) -> Iterator[Sequence[int]]:
        """Places in the index of each batch of all ranks, from the first wanted one on."""
        # Incomplete batches, and those of rare shapes, would otherwise gather at the end of every epoch.
        mixed, epoch, size = mix_seed(*key), key[1], self.batch_size * self.num_replicas
        if self.computes_order:
            counts = list(self._counts().values())
            seeds = [mix_seed(*key, *([bucket] if len(counts) > 1 else [])) for bucket in range(len(counts))]
            orders = [IndexedPermutation(count, seed) for count, seed in zip(counts, seeds)]
            for number in IndexedPermutation(self._length, mix_seed(mixed, epoch, 0)).walk(range(first, self._length)):
                bucket = bisect_right(self._ends, number)
                begin = (number - (self._ends[bucket - 1] if bucket else 0)) * size
                places = orders[bucket][range(begin, min(begin + size, counts[bucket]))]
                yield (places if self._buckets is None else self._buckets.find(bucket, places)).tolist()
            return
        if self._buckets is None and not self.shuffle:
            for number in range(first, self._length):
                yield range(number * size, min((number + 1) * size, len(self.index)))
            return
        of = [0] * len(self.index) if self._buckets is None else self._buckets.of
        filled = fill_batches(epoch_order(self.index, self.shuffle, *key), of, size, self.drop_last)  # type: ignore[arg-type]
        if not self.shuffle:
            yield from islice(filled, first, None)
            return
        batches = list(filled)
        for number in list(epoch_order(batches, True, mixed, epoch))[first:]:  # type: ignore[arg-type]
            yield batches[number]

    def __len__(self) -> int:
        return self._length

    def resized(self, batch_size: int) -> "KeyedBatchSampler":
        """A copy with another batch size."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other._count()
        return other

    def largest_batch(self) -> int:
        """The most keys that a batch of one rank can have."""
        counts = self._counts().values()
        return min(counts) // self.num_replicas if self.drop_last else math.ceil(max(counts) / self.num_replicas)

    def alike(self, keys: Sequence[Key]) -> list[Key]:
        """Those of some keys that may be in one batch with the first."""
        if self._buckets is None:
            return list(keys)
        wanted = {index for index, _ in keys}
        bucket_of = {index: self._buckets.of[place] for place, index in enumerate(self.index) if index in wanted}
        return [key for key in keys if bucket_of[key[0]] == bucket_of[keys[0][0]]]


def data_parallel_part(trainer: Any) -> dict[str, Any]:
    """``num_replicas`` and ``rank`` for a :class:`KeyedBatchSampler`, as the trainer's strategy has them.

    With tensor parallelism several processes share one part, which the process group cannot tell. No trainer, or one of
    a single device, leaves both to the process group.
    """
    return dict(getattr(trainer, "distributed_sampler_kwargs", None) or {})


def pins(trainer: Any, wanted: bool) -> bool:
    """Whether a loader is to pin its batches: where the trainer's device is a CUDA one, and nowhere else."""
    return wanted and trainer is not None and trainer.strategy.root_device.type == "cuda"


def loading(module: Any) -> dict[str, Any]:
    """Arguments that all loaders of a data module share."""
    return {"num_workers": module.num_workers, "pin_memory": pins(module.trainer, module.pin_memory)}


class KeyedBatches(Dataset[list[Any]]):
    """A data set of keys as one of batches of keys: item ``[k1, k2, ...]`` is ``[dataset[k1], dataset[k2], ...]``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: list[Key]) -> list[Any]:
        if not isinstance(keys, list):
            raise ConfigurationError(
                f"KeyedBatches: an item is found by a list of (index, variant), not by {keys!r}. Something replaced "
                "the loader's KeyedBatchSampler; Trainer(overfit_batches=...) does, and limit_train_batches does not."
            )
        return [self.dataset[key] for key in keys]


def keyed_loader(
    dataset: Any,
    sampler: KeyedBatchSampler,
    collate: Callable[[list[Any]], Any],
    num_workers: int = 0,
    **arguments: Any,
) -> DataLoader[Any]:
    """A loader of the sampler's batches; items are found by (index, variant), and further arguments are
    ``DataLoader``'s.

    The sampler is the loader's ``sampler`` and not its ``batch_sampler``: Lightning takes batch samplers apart under
    DDP and for prediction, and never tells them the epoch; a ``DistributedSampler`` in that place it leaves whole.
    """
    # Workers' base seed is drawn when iterating begins: from a generator of its own, or validating would change the
    # training that follows.
    generator = torch.Generator().manual_seed(mix_seed(sampler.seed))
    return DataLoader(
        KeyedBatches(dataset),
        batch_size=None,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        generator=generator,
        **arguments,
    )


def module_loader(
    trainer: Any,
    dataset: Any,
    index: Sequence[int],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    *,
    training: bool,
    bucket_of: Callable[[int], Hashable] | None = None,
    variants: int = 1,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = True,
) -> DataLoader[Any]:
    """The loader of a data module's part (the ``index`` of its items), as :func:`keyed_loader` makes it.

    ``training`` shuffles, shows one variant of each item an epoch, and keeps the workers from epoch to epoch; otherwise
    in order, variant 0. Batches are those of each process, of items of one shape; for a CUDA device they may be pinned.
    """
    part = data_parallel_part(trainer)
    sampler = KeyedBatchSampler(index, batch_size, bucket_of, variants if training else 1, seed, training, **part)
    further = {"persistent_workers": True} if num_workers and training else {}
    return keyed_loader(dataset, sampler, collate, num_workers, pin_memory=pins(trainer, pin_memory), **further)

"""Batches of keys (index, variant) with one image shape per batch: a pure function of (seed, epoch) on any rank count.

    order of epoch e   = permutation of the index, seeded by hash(seed, e)
    batches            = the order, filled into one open batch per bucket; then the batches in random order
    above INDEXED_FROM = a permutation of each bucket, cut into batches; then the batches in random order
    part of rank r     = every num_replicas-th key of a batch, from the r-th on
    variant of image i = (hash(seed, e, i) + k) mod variants, where the index holds i for the k-th time, from k = 0
    weight of a row    = with several buckets rows of the part / batch size, else rows of all parts / rows of the batch;
                         0 for a row that pads the part; 1 in a full batch

All ranks therefore see the same shape and the same number of images in a step, and R ranks with batches of B see, step
by step, the images that one process with batches of R * B sees. Images that are cached and images that are encoded
again come in the same order. Above ``INDEXED_FROM`` items a batch is computed on access: its bucket from the number of
the batch, and its positions in the index from :class:`BucketPlaces`, which takes about one byte per item.

Source of the search in BucketPlaces: ``select`` of bit vectors, Clark (1996), http://hdl.handle.net/10012/64
"""

import copy
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.order.indexed_permutation import IndexedPermutation
from lit_efficient.mechanisms.order.resumable_sampler import INDEXED_FROM, epoch_order, shard

Key = tuple[int, int]
"""Index of an image in its dataset, and number of its variant."""

_BLOCK = 4096  # positions that BucketPlaces searches one by one
_COUNTED_AT_ONCE = 2**20
_UNEVEN = 1.5  # weight of an image, relative to one in a full batch, above which it is reported


def variant_of(seed: int, epoch: int, index: int, variants: int) -> int:
    """Return the variant of an image that an epoch shows, in ``[0, variants)``: a pure function of the arguments."""
    if variants == 1:
        return 0
    return mix_seed(seed, epoch, index) % variants


def fill_batches(
    order: Iterable[int], buckets: Sequence[Hashable] | np.ndarray, size: int, drop_last: bool
) -> Iterator[list[int]]:
    """Group positions into batches of one bucket each. Batches come when they are full, incomplete ones at the end.

    Args:
        order: Positions in the order in which they are dealt.
        buckets: Bucket of each position.
        size: Number of positions in a batch.
        drop_last: Leave incomplete batches out.
    """
    open_batches: dict[Hashable, list[int]] = {}
    for position in order:
        bucket = buckets[position]
        batch = open_batches.setdefault(bucket, [])
        batch.append(position)
        if len(batch) == size:
            yield open_batches.pop(bucket)
    if not drop_last:
        yield from open_batches.values()


class WeightedKeys(list[Key]):
    """Batch of keys with the weight of each, for the loss."""

    def __init__(self, keys: Iterable[Key], weights: Sequence[float]) -> None:
        super().__init__(keys)
        self.weights = list(weights)


def occurrences(index: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """Return how often each number occurs before its place, [N]; None if no number occurs twice."""
    if isinstance(index, range):
        return None
    numbers = np.asarray(index)
    order = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[order], prepend=numbers[order[0]] - 1))
    if len(begins) == len(numbers):
        return None
    counts = np.diff(begins, append=len(numbers))
    found = np.empty(len(numbers), np.int64)
    found[order] = np.arange(len(numbers)) - np.repeat(begins, counts)
    return found


class BucketPlaces:
    """Index from (bucket, k) to the position of the k-th item of that bucket, in about one byte per item.

    The number of items of each bucket before each block of positions is counted once. The search inside a block is
    linear.

    Args:
        buckets: Bucket of each position 0, 1, ...
        count: Number of positions.

    Attributes:
        of: Number of each position's bucket, as the smallest unsigned integer type that holds it. Buckets are numbered
            in the order of their first occurrence.
        counts: Number of positions of each bucket, in the order of the buckets' numbers.
    """

    def __init__(self, buckets: Iterable[Hashable], count: int) -> None:
        number_of: dict[Hashable, int] = {}
        numbers = (number_of.setdefault(bucket, len(number_of)) for bucket in buckets)
        self.of: np.ndarray = np.empty(count, np.uint8)
        counts = np.zeros(0, np.int64)
        for first in range(0, count, _COUNTED_AT_ONCE):
            part = np.fromiter(numbers, np.int64, min(_COUNTED_AT_ONCE, count - first))
            # The type widens as soon as more buckets are met than the present one can number.
            self.of = self.of.astype(np.min_scalar_type(len(number_of) - 1), copy=False)
            self.of[first : first + len(part)] = part
            longer_counts = np.bincount(part, minlength=len(number_of))
            longer_counts[: len(counts)] += counts
            counts = longer_counts
        self.counts = dict(zip(number_of, counts.tolist(), strict=True))
        self._block = max(_BLOCK, 64 * len(number_of))  # keeps the table of counts small compared with ``of``

    @cached_property
    def _before(self) -> npt.NDArray[np.int64]:
        """Number of positions of each bucket before each block: [buckets, blocks]."""
        buckets = len(self.counts)
        blocks = -(-len(self.of) // self._block)
        inside = np.zeros((blocks, buckets), np.uint32)
        step = max(1, _COUNTED_AT_ONCE // self._block)
        for first in range(0, blocks, step):
            part = self.of[first * self._block : (first + step) * self._block].astype(np.int64)
            # One bincount counts all blocks of the part, because each block gets numbers of its own.
            part += np.arange(len(part)) // self._block * buckets
            counted = np.bincount(part, minlength=buckets * (-(-len(part) // self._block)))
            inside[first : first + step] = counted.reshape(-1, buckets)
        return np.cumsum(inside, axis=0, dtype=np.int64).T - inside.T

    def find(self, bucket: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of items of a bucket, given how many items of the bucket precede each of them.

        Args:
            bucket: Number of the bucket.
            ranks: Number of preceding items of the bucket, for each wanted item: [n].

        Returns:
            Positions: int64 [n].
        """
        before = self._before[bucket]
        blocks = np.searchsorted(before, ranks, "right") - 1
        places = np.empty_like(ranks)
        for block in np.unique(blocks):
            inside = np.flatnonzero(self.of[block * self._block : (block + 1) * self._block] == bucket)
            here = blocks == block
            places[here] = block * self._block + inside[ranks[here] - before[block]]
        return places


class KeyedBatchSampler(DistributedSampler[list[Key]]):
    """Sampler of batches of (index, variant), each of one bucket, as a pure function of ``(seed, epoch)``.

    Pass the sampler to :func:`keyed_loader`. Because it is a ``DistributedSampler``, Lightning sets its epoch and does
    not replace it under DDP. ``ExactResume`` resumes in the middle of an epoch with the same batches.

    Args:
        index: Indices of the images. An index that occurs several times is shown several times in an epoch, each time
            as the next variant. A ``range`` is not turned into a list if all images have one shape.
        batch_size: Number of keys in a batch of each rank.
        bucket_of: Function from the index of an image to its shape (height, width). A batch has one shape. ``None``:
            all images have the same shape.
        variants: Number of variants of each image. An epoch shows one of them, see :func:`variant_of`.
        seed: Seed of the order and of the variants.
        shuffle: Permute images and batches anew in each epoch. Otherwise the images of a bucket keep the order of
            ``index``, and the batches are ordered by their last image.
        drop_last: Leave incomplete batches out. Otherwise they are padded with their own images, so that all ranks get
            equally many.
        num_replicas: Number of ranks. ``None`` asks the process group, and is 1 without one. See
            :func:`data_parallel_part`.
        rank: Rank whose keys are yielded. ``None`` asks the process group, and is 0 without one.
        weighted: If there are several buckets or ranks, yield `WeightedKeys`. With their weights the mean over ranks is
            the mean of one process that sees all images, and with several buckets a sample of an incomplete batch
            counts as much as one of a full batch.

    Raises:
        ConfigurationError: If an argument is out of range, or if ``drop_last`` would leave out a whole bucket.
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
        weighted: bool = False,
    ) -> None:
        if isinstance(index, Sampler):  # Lightning passes one when it rebuilds a batch sampler under DDP
            allowed = "a sequence of integers (Lightning replaces a batch sampler under DDP: use keyed_loader())"
            raise refusal("KeyedBatchSampler", "index", allowed, type(index).__name__)
        if num_replicas is None:
            num_replicas = place_among_ranks()[1]
        if rank is None:
            rank = place_among_ranks()[0]
        check_number("KeyedBatchSampler", "batch_size", batch_size, least=1, whole=True)
        check_number("KeyedBatchSampler", "variants", variants, least=1, whole=True)
        check_number("KeyedBatchSampler", "seed", seed, least=0, whole=True)
        check_number("KeyedBatchSampler", "num_replicas", num_replicas, least=1, whole=True)
        check_number("KeyedBatchSampler", "rank", rank, least=0, below=num_replicas, whole=True)
        if not len(index):
            raise refusal("KeyedBatchSampler", "index", "a sequence of at least one image", list(index))
        super().__init__(index, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        if not isinstance(index, range):
            index = list(index)
        self.index: Sequence[int] = index
        self.batch_size = batch_size
        self.variants = variants
        self.contents = ""  # hash of the items, if it is known: a run does not resume inside an epoch of others
        self.round = 0  # number of earlier passes in the same epoch: each gets an order of its own
        self.first = 0  # number of batches that the next pass skips
        self._buckets: BucketPlaces | None = None
        if bucket_of is not None:
            buckets = BucketPlaces(map(bucket_of, index), len(index))
            if len(buckets.counts) > 1:
                self._buckets = buckets
        self.weighted = weighted and (self._buckets is not None or num_replicas > 1)
        self._occurrences = occurrences(self.index) if variants > 1 else None
        self._count_batches()

    @property
    def computes_order(self) -> bool:
        """Whether the order is computed on access instead of drawn as a list."""
        return self.shuffle and len(self.index) > INDEXED_FROM

    def _count_batches(self) -> None:
        counts = self._bucket_counts()
        size = self._step_size
        if self.drop_last:
            too_small = {bucket: count for bucket, count in counts.items() if count < size}
            if too_small:
                listed = ", ".join(f"{bucket}: {count}" for bucket, count in sorted(too_small.items(), key=str)[:5])
                raise ConfigurationError(
                    f"KeyedBatchSampler: drop_last would leave out all images of buckets with fewer images than the "
                    f"{size} of a step ({listed}). Use drop_last=False or a smaller batch_size."
                )
            batches = [count // size for count in counts.values()]
        else:
            batches = [math.ceil(count / size) for count in counts.values()]
        # Batches are numbered bucket by bucket; these are the first numbers after each bucket.
        self._ends = list(accumulate(batches))
        self._length = self._ends[-1]

    @property
    def _step_size(self) -> int:
        """Number of images that all ranks together take in one step."""
        return self.batch_size * self.num_replicas

    def _bucket_counts(self) -> Mapping[Hashable, int]:
        if self._buckets is None:
            return {None: len(self.index)}
        return self._buckets.counts

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch  # read now: a set_epoch during the pass is meant for later passes
        first = self.first
        self.first = 0
        for batch in self._batches((self.seed, epoch, self.round), first):
            part = shard(batch, self.rank, self.num_replicas, drop_last=False)
            keys = [self._key(position, epoch) for position in part]
            if self.weighted:
                weight = len(part) / self.batch_size
                if self._buckets is None:
                    weight = len(part) * self.num_replicas / len(batch)
                places = range(self.rank, self.rank + len(part) * self.num_replicas, self.num_replicas)
                # Places beyond the batch only pad it.
                keys = WeightedKeys(keys, [weight if place < len(batch) else 0.0 for place in places])
            yield keys

    def _key(self, position: int, epoch: int) -> Key:
        index = self.index[position]
        variant = variant_of(self.seed, epoch, index, self.variants)
        if self._occurrences is not None:
            variant = (variant + int(self._occurrences[position])) % self.variants
        return index, variant

    def _batches(self, key: tuple[int, int, int], first: int) -> Iterator[Sequence[int]]:
        """Yield the positions in the index of each batch of all ranks, beginning with batch number ``first``."""
        if self.computes_order:
            yield from self._computed_batches(key, first)
        elif self.shuffle:
            batches = list(
                fill_batches(self._drawn_order(key), self._bucket_numbers(), self._step_size, self.drop_last)
            )
            # The second permutation spreads incomplete batches and rare shapes over the epoch: they come last above.
            mixed = epoch_order(batches, True, mix_seed(*key), key[1])
            for number in list(mixed)[first:]:  # type: ignore[arg-type]
                yield batches[number]
        elif self._buckets is None:
            size = self._step_size
            for number in range(first, self._length):
                yield range(number * size, min((number + 1) * size, len(self.index)))
        else:
            batches_in_order = fill_batches(
                self._drawn_order(key), self._bucket_numbers(), self._step_size, self.drop_last
            )
            yield from islice(batches_in_order, first, None)

    def _drawn_order(self, key: tuple[int, int, int]) -> Sequence[int]:
        return epoch_order(self.index, self.shuffle, *key)  # type: ignore[return-value]

    def _bucket_numbers(self) -> Sequence[Hashable] | np.ndarray:
        if self._buckets is None:
            return [0] * len(self.index)
        return self._buckets.of

    def _computed_batches(self, key: tuple[int, int, int], first: int) -> Iterator[Sequence[int]]:
        """Yield batches as :meth:`_batches` does, each computed from its number, without a list of all positions."""
        size = self._step_size
        counts = list(self._bucket_counts().values())
        if self._buckets is None:
            seeds = [mix_seed(*key)]
        else:
            seeds = [mix_seed(*key, bucket) for bucket in range(len(counts))]
        orders = [IndexedPermutation(count, seed) for count, seed in zip(counts, seeds)]
        numbers = IndexedPermutation(self._length, mix_seed(mix_seed(*key), key[1], 0))
        for number in numbers.walk(range(first, self._length)):
            bucket = bisect_right(self._ends, number)
            batches_before = self._ends[bucket - 1] if bucket else 0
            begin = (number - batches_before) * size
            items = orders[bucket][range(begin, min(begin + size, counts[bucket]))]
            if self._buckets is not None:
                items = self._buckets.find(bucket, items)
            yield items.tolist()

    def __len__(self) -> int:
        return self._length

    def uneven_weights(self) -> str | None:
        """Return a sentence about buckets whose images count more than others, or None.

        The loss of a batch is a mean over its images. In an incomplete batch each image counts more: over an epoch
        those of a bucket with n images count ``ceil(n / size) * size / n`` times as much as in full batches.
        """
        size = self._step_size
        weights = {bucket: math.ceil(count / size) * size / count for bucket, count in self._bucket_counts().items()}
        heavy = {bucket: weight for bucket, weight in weights.items() if weight >= _UNEVEN}
        if self._buckets is None or self.drop_last or self.weighted or not heavy:
            return None
        counts = self._bucket_counts()
        most = max(heavy, key=lambda bucket: heavy[bucket])
        return (
            f"{sum(counts[bucket] for bucket in heavy):,} of {len(self.index):,} images count up to "
            f"{heavy[most]:.1f} times as much as the others: a batch has one shape and its loss is a mean, and "
            f"{len(heavy)} of {len(counts)} shapes do not fill their batches of {size} (such as {most} with "
            f"{counts[most]}). A smaller batch_size or fewer shapes make them more even"
        )

    def resized(self, batch_size: int) -> "KeyedBatchSampler":
        """Return a copy with another batch size."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other._count_batches()
        return other

    def largest_batch(self) -> int:
        """Return the largest number of keys that a batch of one rank can have, whatever ``batch_size`` is."""
        counts = self._bucket_counts().values()
        if self.drop_last:
            return min(counts) // self.num_replicas
        return math.ceil(max(counts) / self.num_replicas)

    def alike(self, keys: Sequence[Key]) -> list[Key]:
        """Return those keys that have the same bucket as the first key, and so may share a batch with it."""
        if self._buckets is None:
            return list(keys)
        wanted = {index for index, _ in keys}
        bucket_of = {index: self._buckets.of[place] for place, index in enumerate(self.index) if index in wanted}
        first_index, _ = keys[0]
        return [key for key in keys if bucket_of[key[0]] == bucket_of[first_index]]


def data_parallel_part(trainer: object) -> dict[str, Any]:
    """Return the arguments ``num_replicas`` and ``rank`` of a :class:`KeyedBatchSampler` from the trainer's strategy.

    With tensor parallelism several processes share one part of the data, which the process group does not know. The
    result is empty, which leaves both to the process group, without a trainer or with a trainer of one device.
    """
    return dict(getattr(trainer, "distributed_sampler_kwargs", None) or {})


def pins(trainer: Trainer, wanted: bool) -> bool:
    """Return whether a loader pins its batches: if that is wanted and the trainer's device is a CUDA device."""
    return wanted and trainer is not None and trainer.strategy.root_device.type == "cuda"


def loading(module: Any) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that all loaders of a data module share."""
    return {"num_workers": module.num_workers, "pin_memory": pins(module.trainer, module.pin_memory)}


def no_loaders(module: LightningDataModule) -> list[Any]:
    """Return the loaders of a part that holds nothing: none, with which a fit runs without validation.

    Raises:
        ConfigurationError: If the trainer does not fit. It would measure nothing.
    """
    use = getattr(module.trainer, "state", None)
    if use is not None and use.fn is not None and use.fn.value != "fit":
        raise ConfigurationError(
            f"{type(module).__name__}: nothing is held out to {use.fn.value} on, because val_fraction is 0. Name other "
            "data as val, or set val_fraction above 0."
        )
    # Lightning asks whether this was the intention, which val_fraction: 0 has said.
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    return []


class KeyedBatches(Dataset[list[Any]]):
    """Dataset whose item ``[k1, k2, ...]`` is the list ``[dataset[k1], dataset[k2], ...]`` of another dataset.

    Args:
        dataset: The other dataset.
        weights: Weight of each index in the loss, [N]. With weights, or for `WeightedKeys`, items are mappings and get
            a ``loss_weight``, the product of both.
    """

    def __init__(self, dataset: Any, weights: npt.NDArray[np.float64] | None = None) -> None:
        self.dataset = dataset
        self.weights = weights

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: list[Key]) -> list[Any]:
        if not isinstance(keys, list):
            raise ConfigurationError(
                f"KeyedBatches: an item is a list of keys (index, variant), got {keys!r}. The loader's "
                "KeyedBatchSampler was replaced: Trainer(overfit_batches=...) does so; use limit_train_batches instead."
            )
        items = [self.dataset[key] for key in keys]
        if self.weights is None and not isinstance(keys, WeightedKeys):
            return items
        weights = keys.weights if isinstance(keys, WeightedKeys) else [1.0] * len(keys)
        if self.weights is not None:
            weights = [weight * float(self.weights[index]) for weight, (index, _) in zip(weights, keys)]
        return [item | {"loss_weight": torch.tensor(weight)} for item, weight in zip(items, weights)]


def keyed_loader(
    dataset: Any,
    sampler: KeyedBatchSampler,
    collate: Callable[[list[Any]], Any],
    num_workers: int = 0,
    weights: npt.NDArray[np.float64] | None = None,
    **arguments: Any,
) -> DataLoader[object]:
    """Return a ``DataLoader`` of the sampler's batches.

    Args:
        dataset: Dataset whose items are found by (index, variant).
        sampler: Sampler of the batches. It becomes the loader's ``sampler`` and not its ``batch_sampler``: Lightning
            rebuilds batch samplers under DDP and for prediction, and never sets their epoch.
        collate: Function from a list of items to a batch.
        num_workers: Number of worker processes.
        weights: Weight of each index in the loss, see `KeyedBatches`.
        arguments: Further arguments of ``DataLoader``.
    """
    # The base seed of the workers is drawn when iteration begins. The loader draws it from its own generator, because
    # otherwise validation would advance the global one and change the training that follows.
    generator = torch.Generator().manual_seed(mix_seed(sampler.seed))
    return DataLoader(
        KeyedBatches(dataset, weights),
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
    weighted: bool = False,
    weights: npt.NDArray[np.float64] | None = None,
    contents: str = "",
) -> DataLoader[Any]:
    """Return the loader of a data module for the items of ``index``, made by :func:`keyed_loader`.

    Args:
        trainer: The data module's trainer, which says what part of the data this process reads.
        dataset: Dataset whose items are found by (index, variant).
        index: Indices of the items.
        collate: Function from a list of items to a batch.
        batch_size: Number of items in a batch of each process. They have one shape.
        training: Shuffle, show one variant of each item per epoch, and keep the workers between epochs. Otherwise items
            come in order, as variant 0.
        bucket_of: Function from the index of an item to its shape.
        variants: Number of variants of each item.
        seed: Seed of the order and of the variants.
        num_workers: Number of worker processes.
        pin_memory: Pin the batches if the device is a CUDA device.
        weighted: Give samples of incomplete batches smaller weights, see `KeyedBatchSampler`.
        weights: Weight of each index in the loss, see `KeyedBatches`.
        contents: Hash of the items. A run does not resume inside an epoch of items with another hash. "" for none.
    """
    part = data_parallel_part(trainer)
    if not training:
        variants = 1
    sampler = KeyedBatchSampler(index, batch_size, bucket_of, variants, seed, training, weighted=weighted, **part)
    sampler.contents = contents
    further = {"persistent_workers": True} if num_workers and training else {}
    pinned = pins(trainer, pin_memory)
    return keyed_loader(dataset, sampler, collate, num_workers, weights, pin_memory=pinned, **further)

"""A data order that is a pure function of ``(seed, epoch, round)``, and the seeds that everything else is drawn from.

    order(epoch, round) = permutation drawn from a generator seeded by hash(seed, epoch, round)

A hash, because ``seed + epoch`` gives the second epoch of one run the order of the first epoch of the next. Above
``INDEXED_FROM`` items the permutation is computed where it is read (:mod:`~.indexed_permutation`): a drawn one is a
list of all of them, in each process, of 3.7 GiB for 100 million.
"""

import copy
import hashlib
import math
import random
from collections.abc import Iterator, Sequence, Sized

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lit_efficient.errors import check_number
from lit_efficient.mechanisms.order.indexed_permutation import IndexedPermutation
from lit_efficient.mechanisms.ranks import place_among_ranks

INDEXED_FROM = 2**20  # items; orders of fewer are drawn, as they have always been
_MPS = torch.backends.mps.is_available()


def mix_seed(*parts: int) -> int:
    """A seed of 63 bits from integers: equal parts give equal seeds everywhere, neighbours unrelated ones."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (all devices in use), Python and NumPy: about 15 microseconds on the CPU.

    ``torch.manual_seed`` takes twenty times as long where it records a stack trace for devices that are not in use.
    """
    torch.default_generator.manual_seed(seed)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed_all(seed)
    if _MPS:
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def epoch_order(
    source: Sized, shuffle: bool, seed: int, epoch: int, round: int = 0, indexed: bool = False
) -> Sequence[int] | IndexedPermutation:
    """The indices of one pass: a pure function of its arguments.

    Of one of torch's own samplers the draws are taken from a generator made here, and it decides by itself whether to
    permute. ``indexed`` computes a permutation where it is read, instead of drawing all of it; another permutation.
    """
    key, count = mix_seed(seed, epoch, round), len(source)
    whole = permutes(source, shuffle)
    if not whole and (type(source) is SequentialSampler or not isinstance(source, Sampler)):
        return range(count)
    if whole and indexed:
        return IndexedPermutation(count, key)
    generator = torch.Generator().manual_seed(key)
    if isinstance(source, Sampler):
        if hasattr(source, "generator"):
            source = copy.copy(source)
            source.generator = generator
        return list(source)
    return torch.randperm(count, generator=generator, device="cpu").tolist()


def permutes(source: Sized, shuffle: bool) -> bool:
    """Whether a pass shows each index of a dataset once, in random order; arguments as for :func:`epoch_order`."""
    if type(source) is RandomSampler:
        return not source.replacement and len(source) == len(source.data_source)
    return shuffle and not isinstance(source, Sampler)


def shard(indices: Sequence[int], rank: int, num_replicas: int, drop_last: bool) -> list[int]:
    """One rank's part of the indices, of equal length on every rank: padded from the front, or cut at the end."""
    if drop_last:
        indices = indices[: len(indices) // num_replicas * num_replicas]
    elif indices:
        total = math.ceil(len(indices) / num_replicas) * num_replicas
        indices = [indices[position % len(indices)] for position in range(total)]
    return list(indices[rank::num_replicas])


class ResumableSampler(DistributedSampler[int]):
    """A sampler whose order is a pure function of ``(seed, epoch, round)``, whole or as one rank's part.

    It is a ``DistributedSampler`` so that Lightning tells it the epoch and does not wrap it in another one.

    Args:
        source: The dataset, or one of torch's samplers that draws from a ``generator``.
        shuffle: Whether to permute a dataset's indices.
        seed: The run's seed, not negative.
        num_replicas: Number of parts. ``None`` asks the process group, one without it.
        rank: Which part. ``None`` asks the process group, 0 without it.
        drop_last: Cut the indices that do not divide by ``num_replicas`` instead of padding.

    Raises:
        ConfigurationError: If the seed is negative or the rank is not in ``[0, num_replicas)``.
    """

    def __init__(
        self,
        source: Sized,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        num_replicas = place_among_ranks()[1] if num_replicas is None else num_replicas
        rank = place_among_ranks()[0] if rank is None else rank
        check_number("ResumableSampler", "seed", seed, least=0, whole=True)
        check_number("ResumableSampler", "rank", rank, least=0, below=num_replicas, whole=True)
        super().__init__(source, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.source = source
        self.round = 0
        self.first = 0  # indices of its part that the next pass leaves out
        self.indexed = True  # false to go on in the order of a run that drew all of it

    @property
    def computes_order(self) -> bool:
        """Whether the order is computed where it is read."""
        return self.indexed and len(self.source) > INDEXED_FROM and permutes(self.source, self.shuffle)

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        order = epoch_order(self.source, self.shuffle, self.seed, self.epoch, self.round, self.computes_order)
        if isinstance(order, list):
            return iter(shard(order, self.rank, self.num_replicas, self.drop_last)[first:])
        places = range(self.rank, len(self) * self.num_replicas, self.num_replicas)[first:]
        return order.walk(places) if isinstance(order, IndexedPermutation) else (p % len(order) for p in places)

    def __len__(self) -> int:
        whole, parts = len(self.source), self.num_replicas
        return whole // parts if self.drop_last else math.ceil(whole / parts)

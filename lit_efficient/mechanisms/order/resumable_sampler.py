"""Data order that is a pure function of ``(seed, epoch, round)``, and the derivation of all other random seeds.

    order(epoch, round) = permutation drawn from a generator seeded by hash(seed, epoch, round)

The seed is a hash because ``seed + epoch`` would give the second epoch of one run the order of the first epoch of the
run with the next seed. Above ``INDEXED_FROM`` items the permutation is computed on access
(:mod:`~.indexed_permutation`). A drawn permutation is a list of all items in each process: 3.7 GiB for 100 million.
"""

import copy
import math
from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.order.indexed_permutation import IndexedPermutation

INDEXED_FROM = 2**20  # items; smaller orders are drawn as a list


def epoch_order(
    source: Sized, shuffle: bool, seed: int, epoch: int, round: int = 0, indexed: bool = False
) -> Sequence[int] | IndexedPermutation:
    """Return the indices of one pass over the data, as a pure function of the arguments.

    Args:
        source: A dataset, or one of torch's samplers. A sampler decides by itself whether to permute; its random
            numbers come from a generator that is created here.
        shuffle: Permute the indices of a dataset.
        seed: Seed of the run.
        epoch: Epoch of the pass.
        round: Number of passes that were begun before in the same epoch.
        indexed: Return an ``IndexedPermutation`` instead of a drawn list. The permutation is a different one.
    """
    key = mix_seed(seed, epoch, round)
    count = len(source)
    permuted = permutes(source, shuffle)
    if not permuted and (type(source) is SequentialSampler or not isinstance(source, Sampler)):
        return range(count)
    if permuted and indexed:
        return IndexedPermutation(count, key)
    generator = torch.Generator().manual_seed(key)
    if isinstance(source, Sampler):
        if hasattr(source, "generator"):
            source = copy.copy(source)
            source.generator = generator
        return list(source)
    return torch.randperm(count, generator=generator, device="cpu").tolist()


def permutes(source: Sized, shuffle: bool) -> bool:
    """Return whether a pass shows each index once, in random order. The arguments are those of :func:`epoch_order`."""
    if type(source) is RandomSampler:
        return not source.replacement and len(source) == len(source.data_source)
    return shuffle and not isinstance(source, Sampler)


def shard(indices: Sequence[int], rank: int, num_replicas: int, drop_last: bool) -> list[int]:
    """Return the indices of one rank. All ranks get equally many.

    Args:
        indices: Indices of all ranks.
        rank: Rank whose indices are returned.
        num_replicas: Number of ranks.
        drop_last: Cut the last indices to reach equal lengths. Otherwise the first indices are repeated at the end.
    """
    if drop_last:
        indices = indices[: len(indices) // num_replicas * num_replicas]
    elif indices:
        total = math.ceil(len(indices) / num_replicas) * num_replicas
        indices = [indices[position % len(indices)] for position in range(total)]
    return list(indices[rank::num_replicas])


class ResumableSampler(DistributedSampler[int]):
    """Sampler whose order is a pure function of ``(seed, epoch, round)``. It yields all indices, or those of one rank.

    The class derives from ``DistributedSampler``, so that Lightning sets the epoch and does not wrap the sampler again.

    Args:
        source: The dataset, or one of torch's samplers that draws from a ``generator``.
        shuffle: Permute the indices of a dataset.
        seed: Seed of the run, at least 0.
        num_replicas: Number of ranks. ``None`` asks the process group, and is 1 without one.
        rank: Rank whose indices are yielded. ``None`` asks the process group, and is 0 without one.
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
        if num_replicas is None:
            num_replicas = place_among_ranks()[1]
        if rank is None:
            rank = place_among_ranks()[0]
        check_number("ResumableSampler", "seed", seed, least=0, whole=True)
        check_number("ResumableSampler", "rank", rank, least=0, below=num_replicas, whole=True)
        super().__init__(source, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.source = source
        self.round = 0
        self.first = 0  # number of indices of this rank that the next pass skips

    @property
    def computes_order(self) -> bool:
        """Whether the order is computed on access instead of drawn as a list."""
        return len(self.source) > INDEXED_FROM and permutes(self.source, self.shuffle)

    def __iter__(self) -> Iterator[int]:
        first = self.first
        self.first = 0
        order = self._order()
        if isinstance(order, list):
            return iter(shard(order, self.rank, self.num_replicas, self.drop_last)[first:])
        # Neither a range nor a computed permutation is made a list: it may have a hundred million items.
        positions = range(self.rank, len(self) * self.num_replicas, self.num_replicas)[first:]
        if isinstance(order, IndexedPermutation):
            return order.walk(positions)
        return (position % len(order) for position in positions)

    def _order(self) -> Sequence[int] | IndexedPermutation:
        """Return the indices of all ranks."""
        return epoch_order(self.source, self.shuffle, self.seed, self.epoch, self.round, self.computes_order)

    def __len__(self) -> int:
        if self.drop_last:
            return len(self.source) // self.num_replicas
        return math.ceil(len(self.source) / self.num_replicas)

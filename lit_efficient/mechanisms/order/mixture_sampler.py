"""Order of a mixture of sources, as a pure function of ``(seed, epoch, round)``.

    source i of n_i items, k_i passes:  floor(k_i) times all items, and the next (k_i mod 1) n_i items of a permutation
    order of an epoch                =  permutation of all of these

The permutation of a source is the same in all epochs, and each epoch continues where the last one has stopped. So a
source that is cut to half its size is read as a whole in two epochs.
"""

from collections.abc import Sequence

import numpy as np

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler


class MixtureSampler(ResumableSampler):
    """Sampler of the items of several sources that are placed one after the other in a dataset.

    Args:
        sizes: Number of items of each source.
        passes: Number of passes over each source in an epoch, above 0.
        seed: Seed of the order, at least 0.
        num_replicas: Number of ranks. ``None`` asks the process group, and is 1 without one.
        rank: Rank whose indices are yielded. ``None`` asks the process group, and is 0 without one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        passes: Sequence[float],
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.sizes = [int(size) for size in sizes]
        # At least one item, so that no source disappears in silence.
        self.counts = [max(1, round(float(number) * size)) for number, size in zip(passes, self.sizes)]
        super().__init__(range(sum(self.counts)), seed=seed, num_replicas=num_replicas, rank=rank)

    @property
    def computes_order(self) -> bool:
        return False

    def _order(self) -> list[int]:
        taken = []
        begin = 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts)):
            whole, rest = divmod(count, size)
            permutation = np.random.default_rng(mix_seed(self.seed, source)).permutation(size)
            first = (self.epoch + self.round) * rest
            part = permutation[np.arange(first, first + rest) % size]
            taken += [begin + np.tile(np.arange(size), whole), begin + part]
            begin += size
        order = np.concatenate(taken)
        return np.random.default_rng(mix_seed(self.seed, self.epoch, self.round)).permutation(order).tolist()

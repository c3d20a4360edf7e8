"""Order in which the rows of a batch have similar lengths, as a pure function of ``(seed, epoch, round)``.

    permutation of all rows -> pools of 50 batches, each sorted by length -> batches in random order

A batch is padded to its longest row, so that similar lengths need little padding. The order of batches stays random.

Source: ``group_by_length`` of transformers
"""

from collections.abc import Sequence

import numpy as np

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler

_POOL = 50  # batches, as in transformers


class LengthSampler(ResumableSampler):
    """Sampler of rows whose consecutive ones have similar lengths. Rows that fill no batch of all ranks are left out.

    Args:
        lengths: Length of each row [N].
        batch_size: Rows in a batch of one rank.
        seed: Seed of the order, at least 0.
        num_replicas: Number of ranks. ``None`` asks the process group, and is 1 without one.
        rank: Rank whose indices are yielded. ``None`` asks the process group, and is 0 without one.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(range(len(lengths)), seed=seed, num_replicas=num_replicas, rank=rank)
        self.lengths = np.asarray(lengths)
        self.of_all_ranks = batch_size * self.num_replicas

    @property
    def computes_order(self) -> bool:
        return False

    def _order(self) -> list[int]:
        draws = np.random.default_rng(mix_seed(self.seed, self.epoch, self.round))
        size = self.of_all_ranks
        order = draws.permutation(len(self.lengths))
        batches = []
        for first in range(0, len(order) // size * size, _POOL * size):
            pool = order[first : first + _POOL * size]
            pool = pool[: len(pool) // size * size]
            batches += np.split(pool[np.argsort(self.lengths[pool], kind="stable")], len(pool) // size)
        return np.concatenate([batches[i] for i in draws.permutation(len(batches))] or [order[:0]]).tolist()

    def __len__(self) -> int:
        return len(self.lengths) // self.of_all_ranks * self.of_all_ranks // self.num_replicas

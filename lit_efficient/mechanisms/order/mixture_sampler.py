"""Order of a mixture of sources, as a pure function of ``(seed, epoch, round)``.

    k_i(t)   passes over source i in an epoch at place t of training: piecewise linear in t, constant without a schedule
    an epoch = the next n_i * mean k_i items of a permutation of source i, which is repeated without end;
               their places in the epoch are drawn with a density in proportion to k_i(t)

The permutation of a source is the same in all epochs, and each epoch continues where the last one has stopped. So a
source that is cut to half its size is read as a whole in two epochs.
"""

import math
from collections.abc import Sequence

import numpy as np

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler

# Places of an epoch at which the passes are evaluated, to integrate them.
_GRID = np.linspace(0, 1, 257)


class MixtureSampler(ResumableSampler):
    """Sampler of the items of several sources that are placed one after the other in a dataset.

    Args:
        sizes: Number of items of each source [S].
        passes: Number of passes over each source in an epoch, [S] or, as a schedule, [K, S]: at K places at equal
            distances from the first epoch's beginning to the end of ``epochs``. Later ones are like the last.
        seed: Seed of the order, at least 0.
        num_replicas: Number of ranks. ``None`` asks the process group, and is 1 without one.
        rank: Rank whose indices are yielded. ``None`` asks the process group, and is 0 without one.
        epochs: Length of the schedule in epochs, above 0.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        passes: Sequence[float] | Sequence[Sequence[float]],
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        epochs: float = 1.0,
    ) -> None:
        self.sizes = [int(size) for size in sizes]
        self.passes = np.atleast_2d(np.asarray(passes, dtype=np.float64))
        self.epochs = epochs
        # All epochs have the same length: that of an epoch with the mean of the schedule.
        self.total = sum(_rounded(schedule_mean(self.passes) * self.sizes))
        super().__init__(range(self.total), seed=seed, num_replicas=num_replicas, rank=rank)

    @property
    def computes_order(self) -> bool:
        return False

    def _progress(self, epoch: int) -> np.ndarray:
        """Return the integral of the passes over each source from the beginning of an epoch [len(_GRID), S]."""
        rates = schedule_at(self.passes, (epoch + _GRID) / self.epochs)
        steps = (rates[1:] + rates[:-1]) / 2 * np.diff(_GRID)[:, None]
        return np.concatenate([np.zeros((1, len(self.sizes))), np.cumsum(steps, axis=0)])

    def counts(self, epoch: int) -> list[int]:
        """Return the number of items of each source in an epoch."""
        if len(self.passes) == 1:
            return _rounded(self.passes[0] * self.sizes)  # the integral would round another way
        wanted = self._progress(epoch)[-1] * self.sizes
        counts = _rounded(wanted * self.total / wanted.sum())
        # What rounding has added or lost is least at the largest source.
        counts[int(np.argmax(counts))] += self.total - sum(counts)
        return counts

    def _order(self) -> list[int]:
        epoch = self.epoch + self.round
        counts = self.counts(epoch)
        # From the end of the schedule on, all epochs have the same counts.
        changing = min(epoch, math.ceil(self.epochs))
        before = [self.counts(earlier) for earlier in range(changing)] + [counts] * (epoch - changing)
        progress = self._progress(epoch)
        draws = np.random.default_rng(mix_seed(self.seed, self.epoch, self.round))
        items = []
        places = []
        begin = 0
        for source, (size, count) in enumerate(zip(self.sizes, counts)):
            permutation = np.random.default_rng(mix_seed(self.seed, source)).permutation(size)
            first = sum(one[source] for one in before)
            items.append(begin + permutation[np.arange(first, first + count) % size])
            quantiles = progress[:, source] / max(progress[-1, source], 1e-12)
            places.append(np.interp(draws.random(count), quantiles, _GRID))
            begin += size
        return np.concatenate(items)[np.argsort(np.concatenate(places))].tolist()


def schedule_at(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a schedule at places between 0 and 1.

    Args:
        values: Points of the schedule at equal distances, [K, S]. Between them it is linear.
        places: [N]. From 1 on the schedule keeps its last value.

    Returns:
        [N, S].
    """
    points = np.linspace(0, 1, len(values))
    return np.stack([np.interp(places, points, column) for column in values.T], axis=1)


def schedule_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean [S] of a schedule [K, S] that is linear between its K points."""
    if len(values) == 1:
        return values[0]
    return (values[1:] + values[:-1]).mean(axis=0) / 2


def _rounded(wanted: np.ndarray) -> list[int]:
    """Return whole numbers: at least 1 for what is wanted at all, so that no source disappears in silence."""
    return [max(1, round(float(number))) if number > 0 else 0 for number in wanted]

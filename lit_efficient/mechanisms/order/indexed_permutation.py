"""A pseudo-random permutation of [0, n) that is computed where it is read: no list, whatever n is.

    (l, r) -> (r, l xor f(r, key_i)),  i = 1..8, over 2k bits with n <= 4^k;  again from there while the result is >= n

A Feistel network is a bijection whatever f is; walking on until the result lies below n keeps it one. At most four
steps are walked on average, as 4^k < 4n.

Source: Luby and Rackoff (1988), https://doi.org/10.1137/0217022; cycle walking: Black and Rogaway (2002),
https://doi.org/10.1007/3-540-45760-7_9.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_AT_ONCE = 4096


class IndexedPermutation:
    """A permutation of ``range(count)``: a pure function of ``count`` and ``seed``, in constant memory.

    Args:
        count: How many, at least 1.
        seed: Which permutation, in [0, 2^64).

    Example:
        >>> sorted(IndexedPermutation(10, seed=0)[range(10)].tolist()) == list(range(10))
        True
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        half = max(1, -(-(count - 1).bit_length() // 2))
        self._shift, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        drawn = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        self._keys = list(_scrambled(drawn))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: range) -> npt.NDArray[np.int64]:
        """What stands in some places: int64, as many as there are places, each taken modulo ``count``."""
        taken = np.arange(places.start, places.stop, places.step, dtype=np.int64) % self._count
        found = self._shuffled(taken.astype(np.uint64))
        while (outside := found >= self._count).any():
            found[outside] = self._shuffled(found[outside])
        return found.astype(np.int64)

    def _shuffled(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = numbers >> self._shift, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right + key) & self._mask)
        return (left << self._shift) | right

    def walk(self, places: range) -> Iterator[int]:
        """What stands in the places, one after another."""
        for start in range(0, len(places), _AT_ONCE):
            yield from self[places[start : start + _AT_ONCE]].tolist()


def _scrambled(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: each bit of the result depends on all bits; numpy's products wrap."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))

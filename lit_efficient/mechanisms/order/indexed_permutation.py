"""Pseudo-random permutation of [0, n) that is computed on access, so that it needs no list whatever n is.

    (l, r) -> (r, l xor f(r, key_i)),  i = 1..8, over 2k bits with n <= 4^k;  repeated while the result is >= n

A Feistel network is a bijection for every function f. Repeating the network until the result is below n ("cycle
walking") keeps the map a bijection on [0, n). The network is applied four times on average at most, because 4^k < 4n.

Source: Luby and Rackoff (1988), https://doi.org/10.1137/0217022; cycle walking: Black and Rogaway (2002),
https://doi.org/10.1007/3-540-45760-7_9.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_CHUNK = 4096  # positions that walk() computes in one vectorised call


class IndexedPermutation:
    """Permutation of ``range(count)`` that is a pure function of ``count`` and ``seed`` and takes constant memory.

    Args:
        count: Number of items, at least 1.
        seed: Number that selects the permutation, in [0, 2^64).

    Example:
        >>> sorted(IndexedPermutation(10, seed=0)[range(10)].tolist()) == list(range(10))
        True
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        half_bits = max(1, -(-(count - 1).bit_length() // 2))
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        counter = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
        self._keys = list(_scrambled(counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, positions: range) -> npt.NDArray[np.int64]:
        """Return the items at ``positions``, each position taken modulo ``count``: int64 [len(positions)]."""
        wrapped = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64) % self._count
        items = self._permuted(wrapped.astype(np.uint64))
        while True:
            outside = items >= self._count
            if not outside.any():
                return items.astype(np.int64)
            items[outside] = self._permuted(items[outside])

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Apply the Feistel network once to numbers of 2k bits."""
        left = numbers >> self._shift
        right = numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right + key) & self._mask)
        return (left << self._shift) | right

    def walk(self, positions: range) -> Iterator[int]:
        """Yield the items at ``positions`` one after another."""
        for start in range(0, len(positions), _CHUNK):
            yield from self[positions[start : start + _CHUNK]].tolist()


def _scrambled(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of SplitMix64, in which each output bit depends on all input bits.

    NumPy's products of unsigned integers wrap around, as the algorithm requires.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))

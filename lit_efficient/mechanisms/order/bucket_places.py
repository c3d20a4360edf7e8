"""Which bucket each of many items is of, and where the k-th item of a bucket stands, with about a byte an item.

    find(b, k) = the place p with bucket(p) = b and k items of b before it

How many items of each bucket come before every block of places is counted once, the rest is searched in one block: the
``select`` of bit vectors, Clark (1996), http://hdl.handle.net/10012/64.
"""

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK, _COUNTED_AT_ONCE = 4096, 2**20


class BucketPlaces:
    """Buckets of the places 0, 1, ... of an index.

    Args:
        buckets: Of each place.
        count: How many places there are.

    Attributes:
        of: The number of each place's bucket, in as few bytes as hold it; they are numbered as they come.
        counts: How many places each bucket has, in the order of their numbers.
    """

    def __init__(self, buckets: Iterable[Hashable], count: int) -> None:
        numbers: dict[Hashable, int] = {}
        found = (numbers.setdefault(bucket, len(numbers)) for bucket in buckets)
        self.of: npt.NDArray[Any] = np.empty(count, np.uint8)
        counts = np.zeros(0, np.int64)
        for first in range(0, count, _COUNTED_AT_ONCE):
            part = np.fromiter(found, np.int64, min(_COUNTED_AT_ONCE, count - first))
            self.of = self.of.astype(np.min_scalar_type(len(numbers) - 1), copy=False)
            self.of[first : first + len(part)] = part
            more = np.bincount(part, minlength=len(numbers))
            more[: len(counts)] += counts
            counts = more
        self.counts = dict(zip(numbers, counts.tolist(), strict=True))
        self._block = max(_BLOCK, 64 * len(numbers))  # so that counts take little beside the numbers themselves

    @cached_property
    def _before(self) -> npt.NDArray[np.int64]:
        """How many places of each bucket come before each block, [buckets, blocks]."""
        buckets, blocks = len(self.counts), -(-len(self.of) // self._block)
        inside = np.zeros((blocks, buckets), np.uint32)
        step = max(1, _COUNTED_AT_ONCE // self._block)
        for first in range(0, blocks, step):
            part = self.of[first * self._block : (first + step) * self._block].astype(np.int64)
            part += np.arange(len(part)) // self._block * buckets
            found = np.bincount(part, minlength=buckets * (-(-len(part) // self._block)))
            inside[first : first + step] = found.reshape(-1, buckets)
        return np.cumsum(inside, axis=0, dtype=np.int64).T - inside.T

    def find(self, bucket: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places of those items of a bucket, each by how many of the bucket come before it."""
        before = self._before[bucket]
        blocks = np.searchsorted(before, ranks, "right") - 1
        places = np.empty_like(ranks)
        for block in np.unique(blocks):
            inside = np.flatnonzero(self.of[block * self._block : (block + 1) * self._block] == bucket)
            here = blocks == block
            places[here] = block * self._block + inside[ranks[here] - before[block]]
        return places

"""Best-fit-decreasing packing: documents of many lengths into as few rows of one length as can be found fast.

    longest document first;  it goes into the fullest row that still has room for it, or into a new one

Equal lengths are interchangeable, and so are rows with equal room. So the lengths are counted, all rows with one amount
of room are filled at a time, and the exact result takes time in the number of *distinct* lengths, not of documents.

Saves: the padding, often more than half of a batch of instructions: 99 % and more of the tokens are real.
Costs: 1,000,000 lengths take less than a second of one core (``benchmarks/packing.py``), once.
Source: Johnson (1973), near-optimal bin packing; for training: Ding et al. (2024), https://arxiv.org/abs/2404.10830.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lit_efficient.errors import refusal


class Bins(Sequence[np.ndarray]):
    """Groups of item numbers, held as two arrays: cheap to make, to send to workers and to keep by the million.

    Args:
        items: item numbers ``[n]``, those of one bin side by side.
        starts: where each bin begins in ``items``, and the end, ``[bins + 1]``.
    """

    def __init__(self, items: np.ndarray, starts: np.ndarray) -> None:
        self.items = items
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of {len(self)}")
        return self.items[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))


def pack_lengths(lengths: ArrayLike, capacity: int) -> Bins:
    """Group items into bins by best-fit-decreasing.

    Args:
        lengths: length of each item ``[n]``, whole numbers in ``[1, capacity]``.
        capacity: most that the lengths of one bin may add up to.

    Returns:
        The bins: every item stands in exactly one, and the order is a function of the arguments.

    Raises:
        ConfigurationError: If a length is not in ``[1, capacity]``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        wrong = sizes[(sizes < 1) | (sizes > capacity)][0]
        raise refusal("pack_lengths", "lengths", f"in [1, capacity = {capacity}]", int(wrong))
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(sizes.size, dtype=np.int64)  # of the items in `order`
    rooms = _Rooms()
    opened = begin = 0
    values, counts = np.unique(sizes, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        begin += count
        left = count
        while left:
            room = rooms.smallest(length)
            each = (room or capacity) // length  # a bin that was fitted best stays it until the length fits no more
            if room is None:
                taken = np.arange(opened, opened - (-left // each))
                opened += len(taken)
            else:
                taken = rooms.take(room, -(-left // each))
            placed = min(left, each * len(taken))
            bin_of[begin - left : begin - left + placed] = np.repeat(taken, each)[:placed]
            left -= placed
            last = placed - each * (len(taken) - 1)  # what fell to the last bin
            rooms.put((room or capacity) - each * length, taken[:-1])
            rooms.put((room or capacity) - last * length, taken[-1:])
    by_bin = np.argsort(bin_of, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(bin_of, minlength=opened))))
    return Bins(order[by_bin], starts)


class _Rooms:
    """Bins by the room that they have; the amounts in use are the bits of one integer, so that the next is a shift."""

    def __init__(self) -> None:
        self._bins: dict[int, list[np.ndarray]] = {}
        self._used = 0

    def smallest(self, least: int) -> int | None:
        """The smallest room of at least ``least`` that some bin has."""
        above = self._used >> least
        return least + (above & -above).bit_length() - 1 if above else None

    def put(self, room: int, bins: np.ndarray) -> None:
        if room and len(bins):
            self._bins.setdefault(room, []).append(bins)
            self._used |= 1 << room

    def take(self, room: int, most: int) -> np.ndarray:
        """Remove up to ``most`` bins with that room, at least one."""
        stack, taken = self._bins[room], []
        while stack and most:
            block = stack.pop()
            if len(block) > most:
                stack.append(block[most:])
                block = block[:most]
            taken.append(block)
            most -= len(block)
        if not stack:
            self._used &= ~(1 << room)
        return np.concatenate(taken)

"""Best-fit-decreasing packing: documents of many lengths in few rows of one length, found fast.

    longest document first;  it goes into the fullest row that still has room for it, or into a new row

Equal lengths are interchangeable, and so are rows with equal room. So the lengths are counted, and all rows with one
amount of room are filled at a time. The exact result takes time in the number of *distinct* lengths, not of documents.

Saves: the padding, often more than half of a batch of instructions: 99 % and more of the tokens are real.
Costs: 1,000,000 lengths take less than a second of one core (``benchmarks/packing.py``), once.
Source: Johnson (1973), near-optimal bin packing; for training: Ding et al. (2024), https://arxiv.org/abs/2404.10830.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lit_efficient.data.text.message_images import PicturedText
from lit_efficient.errors import refusal


class Bins(Sequence[np.ndarray]):
    """Groups of item numbers in two arrays, which are cheap to make, to send to workers and to keep by the million.

    Args:
        items: Item numbers [n], those of one bin side by side.
        starts: Place in ``items`` where each bin begins, and the end, [bins + 1].
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


def joined(groups: Sequence[Bins]) -> Bins:
    """Return the bins of several groups as one."""
    starts = []
    begin = 0
    for bins in groups:
        starts.append(bins.starts[:-1] + begin)
        begin += len(bins.items)
    return Bins(np.concatenate([bins.items for bins in groups]), np.concatenate([*starts, [begin]]))


class PackedRow(list[tuple[np.ndarray, np.ndarray, int]]):
    """Pieces of documents in a packed row, each as ids, labels and bytes of text, and the number of their source."""

    source = 0
    pictured: PicturedText | None = None  # text and images of a conversation that is not packed, for a processor


def pack_lengths(lengths: ArrayLike, capacity: int) -> Bins:
    """Group items into bins by best-fit-decreasing.

    Args:
        lengths: Length of each item [n], whole numbers in [1, capacity].
        capacity: Largest sum of the lengths of a bin.

    Returns:
        The bins. Every item is in exactly one bin, and the order depends on the arguments alone.

    Raises:
        ConfigurationError: If a length is not in [1, capacity].
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        wrong = sizes[(sizes < 1) | (sizes > capacity)][0]
        raise refusal("pack_lengths", "lengths", f"in [1, capacity = {capacity}]", int(wrong))
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(sizes.size, dtype=np.int64)  # of the items in `order`
    rooms = _Rooms()
    opened = 0  # number of bins
    # Number of items of this length and of larger ones.
    end = 0
    values, counts = np.unique(sizes, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        end += count
        left = count
        while left:
            room = rooms.smallest(length)
            space = capacity if room is None else room
            # The best-fitting bin stays the best until this length no longer fits.
            each = space // length
            wanted = -(-left // each)
            if room is None:
                taken = np.arange(opened, opened + wanted)
                opened += wanted
            else:
                taken = rooms.take(room, wanted)
            placed = min(left, each * len(taken))
            bin_of[end - left : end - left + placed] = np.repeat(taken, each)[:placed]
            left -= placed
            in_last = placed - each * (len(taken) - 1)  # items in the last bin
            rooms.put(space - each * length, taken[:-1])
            rooms.put(space - in_last * length, taken[-1:])
    # A stable sort keeps the longest document of each bin first.
    by_bin = np.argsort(bin_of, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(bin_of, minlength=opened))))
    return Bins(order[by_bin], starts)


class _Rooms:
    """Bins by their room. Bit i of an integer is set if a bin has the room i, so the next room is found by a shift."""

    def __init__(self) -> None:
        self._bins: dict[int, list[np.ndarray]] = {}
        self._used = 0

    def smallest(self, least: int) -> int | None:
        """Return the smallest room of at least ``least`` that a bin has."""
        above = self._used >> least
        if not above:
            return None
        lowest_bit = above & -above
        return least + lowest_bit.bit_length() - 1

    def put(self, room: int, bins: np.ndarray) -> None:
        """Add bins with this room."""
        if room and len(bins):
            self._bins.setdefault(room, []).append(bins)
            self._used |= 1 << room

    def take(self, room: int, most: int) -> np.ndarray:
        """Remove and return up to ``most`` bins with this room, at least one."""
        blocks = self._bins[room]
        taken = []
        while blocks and most:
            block = blocks.pop()
            if len(block) > most:
                blocks.append(block[most:])
                block = block[:most]
            taken.append(block)
            most -= len(block)
        if not blocks:
            self._used &= ~(1 << room)
        return np.concatenate(taken)

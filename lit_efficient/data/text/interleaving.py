"""Interleaving of sources, so that every stretch of a stream holds rows of all of them.

    row k of a source of n rows has the place (k + offset) / n in a pass over the stream, with an offset in (0, 1)

Each row is read once in a pass, and all sources end together. The order is a function of the sources only.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from lit_efficient.data.text.reading import Found, Reader

# Sources that are open at the same time. Further ones are read after one of these has ended.
OPEN = 64
# Multiples of it, modulo 1, are spread evenly: sources of a single row must not come all at once.
_GOLDEN = (math.sqrt(5) - 1) / 2


def interleave(reader: Reader, part: int = 0, parts: int = 1) -> Iterator[tuple[bool, Found]]:
    """Yield all rows of a reader, and whether each belongs to a part.

    Every part gets its share of each source, in the same proportions.

    Args:
        reader: Reader of the sources.
        part: Number of the part.
        parts: Number of parts.
    """
    groups = _groups(reader)
    # An estimate may be 0, for example of a file whose only line does not end.
    steps = [1 / max(1.0, sum(reader.estimates[index] for index in group)) for group in groups]
    rows = [chain.from_iterable(map(reader.read, group)) for group in groups]
    read = [0] * len(groups)
    waiting = []
    for number, step in enumerate(steps):
        offset = ((number + 0.5) * _GOLDEN) % 1
        waiting.append((offset * step, number))
    heapq.heapify(waiting)
    while waiting:
        place, number = heapq.heappop(waiting)
        found = next(rows[number], None)
        if found is None:
            continue
        # Without the shift, the first part would get all sources of a single row.
        yield (read[number] + number) % parts == part, found
        read[number] += 1
        heapq.heappush(waiting, (place + steps[number], number))


def _groups(reader: Reader) -> Sequence[Sequence[int]]:
    """Return the sources, as indices, in at most ``OPEN`` groups. A group is read from its first source to its last."""
    total = len(reader.estimates)
    if total <= OPEN:
        return [[index] for index in range(total)]
    # Files are sorted by name: without the shuffle, a group would read one data set before the next.
    order = np.random.default_rng(0).permutation(total).tolist()
    return [order[start::OPEN] for start in range(OPEN)]

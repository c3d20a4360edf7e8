"""Progress of long work before training: a bar of tqdm in a terminal, else a plain line from time to time."""

import math
import sys
import time
from typing import Self

LINE_S = 30.0  # between two lines


class Progress:
    """Count of items that are done. It is printed on the standard error; work that ends soon prints no line.

    At the end of a ``with`` block the bar is removed, also if the work raises an error.

    Args:
        what: Name of the work, such as ``tokenising``.
        unit: Name of the items in the plural.
        total: Number of items, if it is known.
        done: Number of items that an earlier run has done.
        shown: If false, nothing is printed, as in all processes but one that do the same work.
    """

    def __init__(self, what: str, unit: str, total: int | None = None, done: int = 0, shown: bool = True) -> None:
        from tqdm import tqdm

        self.what = what
        self.unit = unit
        self.total = total
        self.done = done
        self._first = done
        self._started = self._last = time.monotonic()
        shown = shown and done != total
        disable = None if shown else True  # None: only where there is no terminal
        self._bar = tqdm(total=total, initial=done, desc=what, unit=f" {unit}", disable=disable, leave=False)
        self._prints = shown and self._bar.disable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def skip(self, count: int) -> None:
        """Add ``count`` items that an earlier run has done, and that say nothing about the time that is left."""
        self._first += count
        self._bar.initial = self._first  # a bar that is not shown has none
        self.update(count)

    def update(self, count: int) -> None:
        """Add ``count`` items. The last one closes the bar."""
        self.done += count
        self._bar.update(count)
        if self.total is not None and self.done >= self.total:
            self.close()
        now = time.monotonic()
        if self._prints and now - self._last >= LINE_S:
            self._last = now
            rate = (self.done - self._first) / (now - self._started)
            line = f"{self.what}: {self.done:,} {self.unit}"
            if self.total is not None and rate:
                left = math.ceil((self.total - self.done) / rate)
                line = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}, about {left:,} s left"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

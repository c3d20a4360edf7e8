"""Progress of long work before training: a bar of tqdm in a terminal, else a plain line from time to time."""

import math
import sys
import time

LINE_S = 30.0  # between two lines


class Progress:
    """Count of items that are done. It is printed on the standard error; work that ends soon prints no line.

    Args:
        what: Name of the work, such as ``tokenising``.
        unit: Name of the items in the plural.
        total: Number of items, if it is known.
        done: Number of items that an earlier run has done.
    """

    def __init__(self, what: str, unit: str, total: int | None = None, done: int = 0) -> None:
        from tqdm import tqdm

        self.what = what
        self.unit = unit
        self.total = total
        self.done = done
        self._first = done
        self._started = self._last = time.monotonic()
        self._bar = tqdm(total=total, initial=done, desc=what, unit=f" {unit}", disable=None, leave=False)
        self._prints = self._bar.disable

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

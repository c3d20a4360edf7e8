"""Searches among plans: the largest value of a setting that fits, in few predictions, each made once.

    peak(n) <= limit < peak(n + 1)

A straight line through what is known says where to look next, as memory grows nearly linearly with a batch; where the
line is wrong, the interval is halved. What is refused counts as what does not fit, with its reason.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import LitEfficientError
from lit_efficient.evidence.fits import AS_IT_IS, Change

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

TRIES = 12
_WAIT = 2.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan of a change, in one line."""

    reason: str


class Predictions:
    """Plans of changes, each made once and kept; ``limit`` is what one may need to fit.

    ``say`` gets a line now and then, of what is being done and how long it will take.
    """

    def __init__(
        self, predict: "Callable[[Change], Plan]", limit: int, say: Callable[[str], None] | None = None
    ) -> None:
        self.predict, self.limit, self.say = predict, limit, say
        self.seconds: list[float] = []
        self._known: dict[str, Plan | Refusal] = {}
        self._task, self._left, self._said = "", 0, time.monotonic()

    def begin(self, task: str, most: int) -> None:
        """What comes next, for the lines of progress, and how many predictions it takes at most."""
        self._task, self._left = task, most

    def __call__(self, change: Change = AS_IT_IS) -> "Plan | Refusal":
        """The plan of a change, or why there is none."""
        key = repr((sorted(change.settings.items()), change.overlays))
        if key not in self._known:
            self._progress()
            start = time.monotonic()
            self._known[key] = self._made(change)
            self.seconds.append(time.monotonic() - start)
            self._left = max(0, self._left - 1)
        return self._known[key]

    def _made(self, change: Change) -> "Plan | Refusal":
        try:
            return self.predict(change)
        except LitEfficientError as error:
            return Refusal(_line(str(error)))
        except Exception as error:  # of a library, on what it cannot do: no reason to lose all other answers
            if change == AS_IT_IS:
                raise
            return Refusal(_line(f"{type(error).__name__}: {error}"))

    def fits(self, change: Change = AS_IT_IS) -> bool:
        """Whether the plan of a change needs no more than the limit; what is refused does not fit."""
        found = self(change)
        return not isinstance(found, Refusal) and found.peak <= self.limit

    def _progress(self) -> None:
        now = time.monotonic()
        if self.say and self.seconds and now - self._said >= _WAIT:
            each = sum(self.seconds) / len(self.seconds)
            left = f", at most {max(1, round(each * self._left))} s left" if self._left else ""
            self.say(f"{self._task}: {len(self.seconds)} plans made, {each:.1f} s each{left}")
            self._said = now


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].removeprefix("error: ")


@dataclass(frozen=True)
class Found:
    """The largest value of a setting that fits."""

    value: int | None  # the value, ``None`` if none that was tried fits
    change: Change = AS_IT_IS  # what sets it
    plan: "Plan | None" = None  # its plan
    above: int | None = None  # the smallest value known not to fit, ``None`` if every one that was tried fits
    above_peak: int | None = None  # bytes that it needs; ``None`` if it is refused
    reason: str = ""  # why it is refused; empty if it needs too much


def largest(
    predictions: Predictions,
    change_of: Callable[[int], Change],
    start: int,
    *,
    step: int = 1,
    amiss: "Callable[[int, Plan], str] | None" = None,
) -> Found:
    """The largest multiple of ``step`` that fits, if a larger one never needs less.

    ``change_of`` sets a value, and ``amiss`` says why a plan is none of it, or nothing. After :data:`TRIES` the
    answer is the largest value known to fit.
    """
    known: dict[int | None, Plan | Refusal] = {}
    peaks: dict[int, int | None] = {}
    low, at = 0, max(1, start // step)
    high: int | None = None
    while (high is None or high - low > 1) and len(peaks) < TRIES:
        found = predictions(change_of(at * step))
        if amiss is not None and not isinstance(found, Refusal) and (reason := amiss(at * step, found)):
            found = Refusal(reason)
        known[at] = found
        peaks[at] = None if isinstance(found, Refusal) else found.peak
        if not isinstance(found, Refusal) and found.peak <= predictions.limit:
            low = at
        else:
            high = at
        at = _next(peaks, low, high, predictions.limit, halve=len(peaks) % 3 == 0)
    best, above = known.get(low), known.get(high)
    assert not isinstance(best, Refusal)
    return Found(
        low * step if low else None,
        change_of(low * step) if low else AS_IT_IS,
        best,
        high * step if high is not None else None,
        None if above is None or isinstance(above, Refusal) else above.peak,
        above.reason if isinstance(above, Refusal) else "",
    )


def _next(peaks: Mapping[int, int | None], low: int, high: int | None, limit: int, halve: bool) -> int:
    """Where to look: at the end of a line through the two values nearest the limit, or between what is known."""
    top = 64 * max(low, 1) if high is None else high
    between = 2 * low if high is None else math.isqrt(low * high) if high > 4 * low > 0 else (low + high) // 2
    known = sorted((abs(peak - limit), n, peak) for n, peak in peaks.items() if peak is not None)[:2]
    guess = between
    if len(known) == 2 and not (halve and high is not None):
        (_, a, at_a), (_, b, at_b) = known
        if (slope := (at_b - at_a) / (b - a)) > 0:
            guess = int(a + (limit - at_a) // slope)
    if guess >= top and high is not None:  # the line leads to where nothing fits
        near = peaks.get(high)
        guess = high - 1 if near is not None and guess == high else between
    return max(low + 1, min(guess, top - 1))


def changed(base: Change, settings: Mapping[str, Any], overlays: tuple[str, ...] = ()) -> Change:
    """A change with more settings and overlays."""
    return Change(base.name, {**base.settings, **settings}, (*base.overlays, *overlays), base.callbacks)

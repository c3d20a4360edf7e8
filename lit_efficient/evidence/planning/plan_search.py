"""Search for the largest value of a setting that fits, with few plans.

    peak(n) <= limit < peak(n + 1)

Memory grows nearly linearly with a batch, so a straight line through known peaks gives the next value. The interval is
halved if the line is wrong. A value that is refused counts as one that does not fit.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_efficient.errors import LitEfficientError
from lit_efficient.evidence.fits import AS_IT_IS, Change

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

TRIES = 12
_WAIT = 2.0  # seconds between two lines of progress
_LONGEST = 20.0  # seconds of one plan of a search, beyond the quickest plan


@dataclass(frozen=True)
class Refusal:
    """Reason why a change cannot be planned, on one line."""

    reason: str


class SearchEnded(Exception):
    """The time of a search is over, and the next plan was not made."""


class Predictions:
    """Plans of changes. Each is made once and kept.

    Args:
        predict: Function that plans a change.
        limit: Bytes that a plan may need to fit.
        say: Function that receives lines of progress; ``None`` reports nothing.
    """

    def __init__(
        self, predict: "Callable[[Change], Plan]", limit: int, say: Callable[[str], None] | None = None
    ) -> None:
        self.predict = predict
        self.limit = limit
        self.say = say
        self.seconds: dict[str, float] = {}  # of each plan
        self._known: dict[str, Plan | Refusal] = {}
        self._smallest: tuple[Change, Plan] | None = None
        self._task = ""
        self._left = 0
        self._said = time.monotonic()
        self._ends = math.inf  # time after which no plan is begun
        self.stopped = False  # True once a plan was not made because of the time

    def end_after(self, seconds: float) -> None:
        """Make no further plan after so many seconds from now: the next one raises :class:`SearchEnded`."""
        self._ends = time.monotonic() + seconds

    def begin(self, task: str, most: int) -> None:
        """Begin a task of at most so many plans. Its name appears in the lines of progress."""
        self._task = task
        self._left = most

    def __call__(self, change: Change = AS_IT_IS) -> "Plan | Refusal":
        """Return the plan of a change, or the reason why it is refused.

        Raises:
            SearchEnded: If the time of the search is over.
        """
        key = _key(change)
        if key not in self._known:
            if time.monotonic() >= self._ends:
                self.stopped = True
                raise SearchEnded
            self._progress()
            start = time.monotonic()
            self._known[key] = self._made(change)
            self.seconds[key] = time.monotonic() - start
            found = self._known[key]
            if not isinstance(found, Refusal) and (self._smallest is None or found.peak < self._smallest[1].peak):
                self._smallest = (change, found)
            self._left = max(0, self._left - 1)
        return self._known[key]

    def _made(self, change: Change) -> "Plan | Refusal":
        try:
            return self.predict(change)
        except LitEfficientError as error:
            return Refusal(_first_line(str(error)))
        except Exception as error:
            # A library that fails on one change must not end the search.
            if change == AS_IT_IS:
                raise
            return Refusal(_first_line(f"{type(error).__name__}: {error}"))

    def smallest(self) -> "tuple[Change, Plan]":
        """Return the change with the smallest peak of all plans that were made, and its plan."""
        assert self._smallest is not None
        return self._smallest

    def fits(self, change: Change = AS_IT_IS) -> bool:
        """True if a change can be planned and needs no more than the limit."""
        found = self(change)
        return not isinstance(found, Refusal) and found.peak <= self.limit

    def _progress(self) -> None:
        now = time.monotonic()
        if self.say and self.seconds and now - self._said >= _WAIT:
            each = sum(self.seconds.values()) / len(self.seconds)
            line = f"{self._task}: {len(self.seconds)} plans made, {each:.1f} s each"
            if self._left:
                # The first plan is no measure of plans with techniques, which may take several times as long.
                longest = max(self.seconds.values())
                most = min(longest * self._left, self._ends - now)
                line += f", at most {max(1, round(most))} s for this search"
            self.say(line)
            self._said = now


def _key(change: Change) -> str:
    # Callbacks have no stable representation, and no search changes them.
    return repr((sorted(change.settings.items()), change.overlays))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].removeprefix("error: ")


@dataclass(frozen=True)
class Found:
    """Largest value of a setting that fits."""

    value: int | None  # ``None`` if no value that was tried fits
    change: Change = AS_IT_IS  # change that sets the value
    plan: "Plan | None" = None  # plan of the change
    above: int | None = None  # smallest value known not to fit; ``None`` if all fit
    above_peak: int | None = None  # bytes that ``above`` needs; ``None`` if it is refused
    reason: str = ""  # reason why ``above`` is refused; empty if it needs too much


def largest(
    predictions: Predictions,
    change_of: Callable[[int], Change],
    start: int,
    *,
    step: int = 1,
    amiss: "Callable[[int, Plan], str] | None" = None,
) -> Found:
    """Search for the largest multiple of ``step`` that fits, if a larger value never needs less memory.

    After :data:`TRIES` plans the result is the largest value known to fit. So it is when larger values would take long
    to plan, as batches of a tiny network whose loss is computed in many chunks, and when the search's time is over.

    Args:
        predictions: Plans of changes.
        change_of: Function that returns the change for a value.
        start: First value to try.
        step: Divisor of all values.
        amiss: Function that returns the reason why a plan is not one of its value, or an empty string.

    Raises:
        SearchEnded: If the time of the search is over before a value is known to fit.
    """
    known: dict[int, Plan | Refusal] = {}
    low = 0
    high: int | None = None
    untried: int | None = None
    seconds: dict[int, float] = {}
    at = max(1, start // step)
    while (high is None or high - low > 1) and len(known) < TRIES:
        change = change_of(at * step)
        try:
            found = predictions(change)
        except SearchEnded:
            if not low:
                raise
            break
        if amiss is not None and not isinstance(found, Refusal):
            reason = amiss(at * step, found)
            if reason:
                found = Refusal(reason)
        seconds[at] = predictions.seconds[_key(change)]
        # A refusal is no peak, so it does not take part in the line.
        known[at] = found
        if not isinstance(found, Refusal) and found.peak <= predictions.limit:
            low = at
        else:
            high = at
        # Every third value halves the interval, in case the line leads astray.
        at = _next(known, low, high, predictions.limit, halve=len(known) % 3 == 0)
        most = _planned_soon(seconds)
        if at > most:
            untried = at
            at = int(most)
            if at <= low:
                break
    # Nothing fits if the smallest value does not.
    value = None
    change = AS_IT_IS
    best: Plan | None = None
    if low:
        value = low * step
        change = change_of(value)
        made = known[low]
        assert not isinstance(made, Refusal)
        best = made
    if high is None and untried is not None:
        reason = "not tried, because its plan would take long; values below it may fit"
        return Found(value, change, best, untried * step, reason=reason)
    if high is None:
        return Found(value, change, best)
    above = known[high]
    if isinstance(above, Refusal):
        return Found(value, change, best, high * step, reason=above.reason)
    return Found(value, change, best, high * step, above.peak)


def _planned_soon(seconds: Mapping[int, float]) -> float:
    """Return the largest value whose plan does not take long, by a line through the two largest values."""
    if len(seconds) < 2:
        return math.inf
    a, b = sorted(seconds)[-2:]
    slope = (seconds[b] - seconds[a]) / (b - a)
    if slope <= 0:
        return math.inf
    return b + (_LONGEST + min(seconds.values()) - seconds[b]) / slope


def _next(known: "Mapping[int, Plan | Refusal]", low: int, high: int | None, limit: int, halve: bool) -> int:
    """Return the next value: the end of a line through the two peaks nearest the limit, or a value in between."""
    # Without an upper end the value may grow 64-fold at most: the line is uncertain far away from known peaks.
    if high is None:
        top = 64 * max(low, 1)
        between = 2 * low
    else:
        top = high
        between = (low + high) // 2
        if high > 4 * low > 0:
            between = math.isqrt(low * high)
    peaks = {n: plan.peak for n, plan in known.items() if not isinstance(plan, Refusal)}
    nearest = sorted((abs(peak - limit), n) for n, peak in peaks.items())[:2]
    guess = between
    if len(nearest) == 2 and not (halve and high is not None):
        (_, a), (_, b) = nearest
        slope = (peaks[b] - peaks[a]) / (b - a)
        if slope > 0:
            guess = int(a + (limit - peaks[a]) // slope)
    if high is not None and guess >= top:
        # The line ends at values that do not fit.
        if guess == high and high in peaks:
            guess = high - 1
        else:
            guess = between
    return max(low + 1, min(guess, top - 1))


def changed(base: Change, settings: Mapping[str, object], overlays: tuple[str, ...] = ()) -> Change:
    """Return a change with more settings and overlays."""
    return Change(base.name, {**base.settings, **settings}, (*base.overlays, *overlays), base.callbacks)

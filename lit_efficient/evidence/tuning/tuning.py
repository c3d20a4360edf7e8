"""Search for the fastest way to run a fit within a memory limit, with the same effective batch and few runs.

    log(seconds for a sample) = FLOPs + Gaussian process over (accumulation, options);    next: least mean - deviation

Each option is planned first. Options that refuse the fit or save nothing are left out. Candidates that do not fit by
plan never run, and neither do candidates that need more than one that did not fit. Of the others, those run for a few
steps that may be the fastest according to the measurements so far. The best of them run longer. Among candidates that
differ only by noise, the one with the fewest options is chosen.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lit_efficient.declaration import format_bytes
from lit_efficient.errors import LitEfficientError, check_number
from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.json_lines import append_record, records
from lit_efficient.evidence.tuning.candidates import Candidate, Space
from lit_efficient.mechanisms.trials.batch_size import largest_fitting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lit_efficient.evidence.measured_run import Measured

STEPS = 5  # timed steps of a first run; each later run of a candidate has twice as many
_RUNGS = (4, 2)  # number of the best candidates that run again, in each turn
_STARTS = 4  # smallest sets of options to begin with, if the unchanged fit does not fit
_CLOSE = 0.01  # relative difference of times that does not matter
# Expected deviations of the logarithm of the time: of an option, along the accumulation, of the interaction of
# options, and of a measurement.
_OPTION = 0.3
_ACCUMULATION = 0.3
_TOGETHER = 0.1
_NOISE = 0.02
_OCTAVES = 2.0  # of accumulation, over which the time changes
_OTHER = 1.5  # ratio of amounts in a step from which on the loader has ignored the batch size
Predict: TypeAlias = Callable[[Change], tuple[int, float]]  # returns the peak in bytes, and the operations of a step
Measure: TypeAlias = Callable[[Change, int], "Measured"]  # takes the number of timed steps too
Array: TypeAlias = "NDArray[np.float64]"


@dataclass
class Row:
    """Results of a candidate."""

    candidate: Candidate
    state: str = ""  # ``ran``, ``too large``, ``refused`` or ``failed``; empty before
    reason: str = ""  # reason why it did not run or has failed
    planned: int = 0  # planned peak of a step in bytes; 0 without a plan
    flops: float = 0.0  # planned operations of an optimizer step
    peak: int = 0  # measured peak in bytes; 0 if it cannot be observed
    seconds: list[float] = field(default_factory=list)  # of each timed step
    amount: float = 0.0  # samples or tokens in a step
    unit: str = ""  # of ``amount``

    @property
    def cost(self) -> float:
        """Logarithm of the seconds for one sample or token."""
        return math.log(statistics.median(self.seconds) / self.amount)

    @property
    def rate(self) -> float:
        """Samples or tokens a second; 0 if the candidate did not run."""
        return math.exp(-self.cost) if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of :attr:`cost`, robust against outliers."""
        logs = [math.log(one) for one in self.seconds]
        middle = statistics.median(logs)
        # 1.4826 and 1.2533 turn the deviation from a median into that of a normal distribution and its median.
        spread = 1.4826 * statistics.median(abs(one - middle) for one in logs)
        return 1.2533 * spread / math.sqrt(len(logs))

    def slower(self, other: "Row", least: float = _CLOSE) -> bool:
        """True if it is slower than another, by more than ``least`` and by more than the noise."""
        return self.cost - other.cost > max(least, 2 * math.hypot(self.error, other.error))


class Ledger:
    """Results by question, stored in a file. A question with a stored result is not evaluated again.

    Args:
        file: The file; ``None`` stores nothing.
        key: Text that distinguishes a search from others in the same file.
    """

    def __init__(self, file: Path | None = None, key: str = "") -> None:
        self.file = file
        self.key = key
        self._known: dict[str, dict[str, Any]] = {}
        if file is not None:
            for record in records(file):
                if record.get("search") == key:
                    self._known[record["asked"]] = record["result"]

    def result(self, asked: str, make: Callable[[], dict[str, object]]) -> dict[str, Any]:
        """Return the stored result of a question, or evaluate and store it."""
        if asked not in self._known:
            self._known[asked] = make()
            if self.file is not None:
                append_record(self.file, {"search": self.key, "asked": asked, "result": self._known[asked]})
        return self._known[asked]


class _OutOfTime(Exception):
    """Nothing new may begin."""


class Search:
    """Search for the fastest candidate.

    Args:
        space: The candidates.
        predict: Function that plans a change. A refusal is an error of this package.
        measure: Function that runs a change for a number of timed steps.
        limit: Bytes that a step may need.
        steps: Timed steps of a first run.
        seconds: Time after which nothing new begins.
        ledger: Stored results; ``None`` stores nothing.
        say: Function that receives lines of progress.

    Attributes:
        rows: The results so far.
        every: All candidates.
        complete: True if the search has come to its end.
    """

    def __init__(
        self,
        space: Space,
        predict: Predict,
        measure: Measure,
        limit: int,
        *,
        steps: int = STEPS,
        seconds: float = math.inf,
        ledger: Ledger | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        check_number("tune", "limit", limit, least=1, whole=True)
        check_number("tune", "steps", steps, least=1, whole=True)
        self.space = space
        self.predict = predict
        self.measure = measure
        self.limit = limit
        self.steps = steps
        self.seconds = seconds
        self.ledger = ledger or Ledger()
        self.say = say
        self.rows: dict[Candidate, Row] = {}
        self.every = space.candidates()
        self.complete = False
        self._begun = time.monotonic()
        self._flops: dict[str, float] = {}  # by option, the logarithm of the ratio of operations
        self._saving: set[str] = set()  # options that reduce the memory
        self._usual: tuple[str, float] | None = None  # unit and amount of a step

    def run(self) -> "Search":
        """Search until the end, or until the time is over."""
        try:
            self._leave_out()
            self._begin()
            candidate = self._next()
            while candidate is not None:
                self._run(candidate)
                candidate = self._next()
            # The best candidates run again, because a first run is short and noisy.
            for rung, most in enumerate(_RUNGS, start=1):
                close = [row for row in self.ran[:most] if not row.slower(self.ran[0], _NOISE)]
                if len(close) > 1:
                    for row in close:
                        self._run(row.candidate, rung)
            self.complete = True
        except _OutOfTime:
            pass
        return self

    @property
    def ran(self) -> list[Row]:
        """The candidates that ran, the fastest first."""
        return sorted((row for row in self.rows.values() if row.state == "ran"), key=lambda row: row.cost)

    @property
    def tried(self) -> int:
        """Number of candidates that were run, including failures."""
        return sum(bool(row.amount) or row.state == "failed" for row in self.rows.values())

    @property
    def best(self) -> Row | None:
        """The fastest candidate, or among equally fast ones the one with the fewest options; ``None`` if none ran."""
        ran = self.ran
        same = [row for row in ran if not row.slower(ran[0])]
        return min(same, key=lambda row: (len(row.candidate.options), row.candidate != self.space.asked), default=None)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _plan(self, candidate: Candidate) -> Row:
        """Return the row of a candidate, with its plan if it can be planned."""
        row = self.rows.setdefault(candidate, Row(candidate))
        if row.planned or row.state:
            return row

        def make() -> dict[str, Any]:
            self._check_time()
            try:
                planned, flops = self.predict(self.space.change(candidate))
            except LitEfficientError as error:
                return {"state": "refused", "reason": str(error)}
            except Exception as error:  # a candidate that cannot be planned may run
                return {"reason": f"not planned: {type(error).__name__}: {error}"}
            return {"planned": planned, "flops": flops}

        for name, value in self.ledger.result(f"plan {candidate}", make).items():
            setattr(row, name, value)
        # A plan that does not fit saves a run that would fail.
        if row.planned > self.limit:
            row.state = "too large"
            row.reason = f"plan: {format_bytes(row.planned)}"
        return row

    def _fits(self, candidate: Candidate) -> bool:
        """True if a candidate may run: neither its plan nor a candidate that needs less has exceeded the limit."""
        row = self.rows.setdefault(candidate, Row(candidate))
        # A candidate with a larger batch and no more options that save memory needs at least as much.
        saving = self._saving.intersection(candidate.options)
        if not row.state:
            for other in self.rows.values():
                less = other.candidate.batch <= candidate.batch and saving.issubset(other.candidate.options)
                if other.state == "too large" and less:
                    row.state = "too large"
                    row.reason = f"{other.candidate} is"
                    break
        return self._plan(candidate).state in ("", "ran")

    def _largest(self, options: Sequence[str]) -> Candidate | None:
        """Return the candidate with the largest batch that fits with some options; ``None`` if there is none."""
        sizes = self.space.sizes
        # The largest batch is usually the fastest, and often fits.
        most = self.space.candidate(sizes[-1], options)
        if self._fits(most):
            return most
        size = largest_fitting(sizes[:-1], lambda size: self._fits(self.space.candidate(size, options)))
        if size is None:
            return None
        return self.space.candidate(size, options)

    # Choice of runs ---------------------------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        """Plan each option alone, and leave out those that refuse the fit or save nothing."""
        for name, option in list(self.space.options.items()):
            # An option may refuse one batch size only.
            for size in dict.fromkeys([self.space.sizes[-1], self.space.asked.batch]):
                base = self._plan(self.space.candidate(size))
                row = self._plan(self.space.candidate(size, [name]))
                if row.state != "refused":
                    break
            self._flops[name] = 0.0
            if row.flops and base.flops:
                self._flops[name] = math.log(row.flops / base.flops)
            if row.state == "refused":
                self.space.leave_out(name, row.reason)
            elif not (row.planned and base.planned) or row.planned < base.planned:
                self._saving.add(name)
            elif option.only_saves:
                self.space.leave_out(name, "it saves nothing here")
        self.every = self.space.candidates()
        sizes = len(self.space.sizes)
        self.say(f"{len(self.every)} candidates: {sizes} batch sizes, {len(self.space.options)} options")

    def _begin(self) -> None:
        """Run the most informative candidates: the unchanged fit, other batch sizes, and each option alone."""
        # The unchanged fit is the reference for the user.
        if self._fits(self.space.asked):
            self._run(self.space.asked)
        for first in self._first_that_fit()[:_STARTS]:
            self._run_smaller_batches(first)
        largest = self.rows.get(self.space.candidate(self.space.sizes[-1]))
        if largest is not None and largest.state == "ran":
            for name, option in list(self.space.options.items()):
                if option.only_saves and self._flops[name] > _CLOSE:
                    self.space.leave_out(name, "everything fits without it, and it needs more operations")
        if self.ran:
            base = self.ran[0].candidate
            for name in [name for name in self.space.options if name not in base.options]:
                candidate = self.space.candidate(base.batch, [*base.options, name])
                if self.space.go_together(candidate.options) and self._fits(candidate):
                    row = self._run(candidate)
                    if row.state == "failed":
                        self.space.leave_out(name, row.reason)
        self.every = self.space.candidates()

    def _first_that_fit(self) -> list[Candidate]:
        """Return the largest batches of the smallest sets of options with which the fit fits, fewest FLOPs first."""
        # Only options that save memory can make it fit.
        sets = [one for one in self.space.sets() if self._saving.issuperset(one)]
        for _, alike in itertools.groupby(sets, len):
            largest = [self._largest(options) for options in alike]
            found = [candidate for candidate in largest if candidate is not None]
            if found:
                return sorted(found, key=self._known_flops)
        return []

    def _run_smaller_batches(self, first: Candidate) -> None:
        """Run a candidate and its smaller batches, until two sizes in a row are no improvement."""
        best = math.inf
        slower = 0
        for size in reversed(self.space.sizes):
            if size <= first.batch and slower < 2:
                row = self._run(self.space.candidate(size, first.options))
                # Time is a smooth curve of the batch size, so that two slower sizes end the search.
                slower += 1
                if row.state == "ran" and row.cost < best:
                    best = row.cost
                    slower = 0

    def _next(self) -> Candidate | None:
        """Return the remaining candidate that may be the fastest; ``None`` if none can improve."""
        ran = self.ran
        if not ran:
            return None
        flops = np.array([self._known_flops(one) for one in self.every])
        # The operations are known by plan, and the process learns only the rest.
        mean, deviation = self._expected(ran, [row.cost - self._known_flops(row.candidate) for row in ran])
        hopes = mean + flops - deviation
        likely = np.ones(len(self.every), bool)
        planned = [row for row in self.rows.values() if row.planned]
        if planned:
            peak, unsure = self._expected(planned, [math.log(row.planned) for row in planned])
            likely = peak - 2 * unsure < math.log(self.limit)
        # Hopes are optimistic bounds: a candidate whose bound is no improvement cannot be the best.
        for index in np.argsort(hopes, kind="stable"):
            if hopes[index] > ran[0].cost - _CLOSE:
                break
            candidate = self.every[index]
            row = self.rows.get(candidate)
            if likely[index] and (row is None or not row.state) and self._fits(candidate):
                return candidate
        return None

    def _expected(self, rows: Sequence[Row], values: Sequence[float]) -> tuple[Array, Array]:
        """Return the mean and the deviation of a quantity for every candidate, given its values for some."""
        known = self._features([row.candidate for row in rows])
        return process(known, np.array(values), self._features(self.every))

    def _features(self, candidates: Sequence[Candidate]) -> Array:
        rows = [
            [math.log2(one.accumulation), *(name in one.options for name in self.space.options)] for one in candidates
        ]
        return np.array(rows, float).reshape(len(candidates), 1 + len(self.space.options))

    def _known_flops(self, candidate: Candidate) -> float:
        return sum(self._flops.get(name, 0.0) for name in candidate.options)

    # Runs -------------------------------------------------------------------------------------------------------------

    def _run(self, candidate: Candidate, rung: int = 0) -> Row:
        row = self._plan(candidate)
        if row.state not in ("", "ran") or (row.state == "ran" and not rung):
            return row
        steps = self.steps * 2**rung

        def make() -> dict[str, Any]:
            self._check_time()
            one = self.measure(self.space.change(candidate), steps)
            if one.late:  # another call may have more time
                raise _OutOfTime
            return {
                "amount": statistics.fmean(one.amounts or [0]),
                "unit": one.unit,
                "peak": one.peak,
                "seconds": list(one.timed),
                "failed": one.failed,
            }

        found = self.ledger.result(f"run {candidate}, {steps} steps", make)
        row.peak = max(row.peak, found["peak"])
        row.unit = found["unit"]
        row.amount = found["amount"]
        failed = found["failed"] or self._doubt(row, found["seconds"])
        if "out of memory" in failed.lower() or row.peak > self.limit:
            row.state = "too large"
            row.reason = failed or f"measured: {format_bytes(row.peak)}"
        elif failed:
            row.state = "failed"
            row.reason = failed
        else:
            row.state = "ran"
            row.seconds = [*row.seconds, *found["seconds"]]
        self._report(row)
        return row

    def _report(self, row: Row) -> None:
        text = f"{self.tried} of {len(self.every)} tried"
        if self.seconds < math.inf:
            left = max(0, int(self.seconds - (time.monotonic() - self._begun)))
            text += f", at most {left // 60}:{left % 60:02d} left"
        outcome = f"{row.state}: {row.reason}"
        if row.state == "ran":
            outcome = f"{row.rate:.4g} {row.unit} a second"
        self.say(f"{text}: {row.candidate}: {outcome}")

    def _doubt(self, row: Row, seconds: list[float]) -> str:
        """Return the reason why the times of a run cannot be used; empty if they can.

        All runs must have the same amount of data in a step, unless an option changes the batches.
        """
        if not seconds or not row.amount:
            return "it made no step that could be timed"
        effects = [self.space.options[name].computes for name in row.candidate.options if name in self.space.options]
        # The first run sets the amount.
        if self._usual is None:
            self._usual = (row.unit, row.amount)
        unit, amount = self._usual
        if "batches" in effects or (unit == row.unit and 1 / _OTHER < row.amount / amount < _OTHER):
            return ""
        place = "accumulate_grad_batches"
        if self.space.place is not None:
            place = self.space.place[0]
        return f"a step has {row.amount:g} {row.unit} instead of {amount:g} {unit}: the loader does not follow {place}"

    def _check_time(self) -> None:
        if time.monotonic() - self._begun > self.seconds:
            raise _OutOfTime


def process(some: Array, values: Array, every: Array) -> tuple[Array, Array]:
    """Return the mean and the deviation of a Gaussian process.

    It is the sum of independent effects of the options, a smooth curve along the accumulation, and their interactions.

    Args:
        some: Features of the known points ``[n, 1 + options]``: the logarithm of the accumulation, then 0 or 1 for
            each option.
        values: Values of the known points ``[n]``.
        every: Features of the points to predict ``[m, 1 + options]``.
    """
    within = _covariance(some, some) + _NOISE**2 * np.eye(len(some))
    between = _covariance(every, some)
    solved = np.linalg.solve(within, np.column_stack([values - values.mean(), between.T]))
    own = _OPTION**2 * (1 + every[:, 1:].sum(1)) + _ACCUMULATION**2 + _TOGETHER**2
    deviation = np.sqrt(np.maximum(own - (between * solved[:, 1:].T).sum(1), 0.0))
    return values.mean() + between @ solved[:, 0], deviation


def _covariance(a: Array, b: Array) -> Array:
    along = np.exp(-0.5 * ((a[:, None, 0] - b[None, :, 0]) / _OCTAVES) ** 2)
    shared = a[:, 1:] @ b[:, 1:].T
    apart = a[:, 1:].sum(1)[:, None] + b[:, 1:].sum(1)[None] - 2 * shared
    return _OPTION**2 * (1 + shared) + _ACCUMULATION**2 * along + _TOGETHER**2 * along * np.exp(-apart)

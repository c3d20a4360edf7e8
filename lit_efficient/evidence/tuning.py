"""The fastest way to run a fit within a memory, at the same effective batch, found by running few of all ways.

    log(seconds for one sample) = flops + gaussian process over (accumulation, options);   run next: least mean - std

Each option is planned first: what refuses the fit, saves nothing or is not needed is left out. What plan says does not
fit never runs, nor does a larger batch of the same. Of the rest those run, a few steps each, that may be the fastest by
what has been measured; the best of these run longer until one is ahead or no longer told apart, and of the latter the
one that adds least is chosen. Every result is a line of a file: a search that was stopped goes on from there.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_efficient.errors import LitEfficientError, check_number
from lit_efficient.evidence.candidates import Candidate, Space
from lit_efficient.evidence.fits import Change
from lit_efficient.mechanisms.trials.batch_size import largest_fitting
from lit_efficient.mechanisms.trials.memory import format_bytes

if TYPE_CHECKING:  # which import Lightning
    from lit_efficient.evidence.measured_run import Measured
    from lit_efficient.evidence.plan import Plan

STEPS = 5  # that are timed in a first run; each later one has twice as many
_RUNGS = (4, 2)  # how many of the best run on in each
_CLOSE = 0.01  # share of time below which two are the same
# Standard deviations of log time that are expected: of an option, along the accumulation, of two of them together, of a
# measurement.
_OPTION, _ACCUMULATION, _TOGETHER, _NOISE = 0.3, 0.3, 0.1, 0.02
_OCTAVES = 2.0  # of accumulation, over which time changes
_FAR_BATCH = 1.5  # times the amount of a step of the fit as it is: the setting is not what its loader follows


Predict = Callable[[Change], "Plan"]
Measure = Callable[[Change, int], "Measured"]  # with the steps that are to be timed


@dataclass
class Row:
    """What is known of a candidate.

    Args:
        candidate: The candidate.
        state: ``ran``, ``too large``, ``refused``, ``failed`` or an empty string before any of it.
        reason: Why it did not run, or failed.
        planned: Bytes at the peak of a step by plan; 0 where there is no plan.
        flops: Of an optimizer step, by plan.
        peak: Measured bytes; 0 where they cannot be seen.
        seconds: Of each timed step.
        amount: Samples or tokens of a step.
        unit: Which of them.
    """

    candidate: Candidate
    state: str = ""
    reason: str = ""
    planned: int = 0
    flops: float = 0.0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    amount: float = 0.0
    unit: str = ""

    @property
    def rate(self) -> float:
        """Samples or tokens a second; 0 where it did not run."""
        return math.exp(-self.cost) if self.seconds else 0.0

    @property
    def cost(self) -> float:
        """Logarithm of the seconds for one sample or token."""
        return math.log(statistics.median(self.seconds) / self.amount)

    @property
    def error(self) -> float:
        """Standard error of :attr:`cost`."""
        logs = [math.log(one) for one in self.seconds]
        middle = statistics.median(logs)
        spread = 1.4826 * statistics.median(abs(one - middle) for one in logs)
        return 1.2533 * spread / math.sqrt(len(logs))


class Ledger:
    """Results by what was asked, a line each in a file: what is there already is not done again.

    Args:
        file: The file; ``None`` keeps nothing.
        key: What tells one search from another in the same file.
    """

    def __init__(self, file: Path | None = None, key: str = "") -> None:
        self.file, self.key = file, key
        self._known: dict[str, dict[str, Any]] = {}
        for line in file.read_text("utf-8").splitlines() if file and file.is_file() else ():
            try:
                record = json.loads(line)
                if record["search"] == key:
                    self._known[record["asked"]] = record["result"]
            except (ValueError, KeyError, TypeError):  # torn when its writer was killed
                continue

    def result(self, asked: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of before, or a new one."""
        if asked not in self._known:
            self._known[asked] = make()
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a", encoding="utf-8") as file:
                    record = {"search": self.key, "asked": asked, "result": self._known[asked]}
                    file.write(json.dumps(record) + "\n")
        return self._known[asked]


class _OutOfTime(Exception):
    """Nothing new may begin."""


class Search:
    """A search for the fastest candidate.

    Args:
        space: What is searched.
        predict: Plans a change; its refusals are errors of this package.
        measure: Runs a change.
        limit: Bytes that a step may take.
        steps: Timed steps of a first run.
        seconds: After which nothing new begins.
        ledger: Results of before.
        say: Told now and then how far it is.
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
        self.space, self.predict, self.measure, self.limit, self.steps = space, predict, measure, limit, steps
        self.rows: dict[Candidate, Row] = {}
        self.ledger, self.say = Ledger() if ledger is None else ledger, say
        self.complete = False
        self._begun = time.monotonic()
        self._seconds = seconds
        self._flops: dict[str, float] = {}  # of an option: the logarithm of how many times as many
        self.every: list[Candidate] = []  # all candidates
        self._saving: set[str] = set()  # options that take memory off
        self._usual: tuple[str, float] | None = None  # what a step has

    def run(self) -> "Search":
        """Search; what is known when time is over counts."""
        try:
            self._leave_out()
            self._begin()
            while (candidate := self._next()) is not None:
                self._run(candidate)
            self._run_on()
            self.complete = True
        except _OutOfTime:
            pass
        return self

    @property
    def ran(self) -> list[Row]:
        """The candidates that ran, the fastest first."""
        return sorted((row for row in self.rows.values() if row.state == "ran"), key=lambda row: row.cost)

    @property
    def tried(self) -> list[Row]:
        """The candidates that were run, whatever came of it."""
        return [row for row in self.rows.values() if row.seconds or row.peak or row.state == "failed"]

    @property
    def best(self) -> Row | None:
        """The fastest; of those that cannot be told from it the one that adds least. ``None``: nothing fits."""
        ran = self.ran
        same = [row for row in ran if not _apart(row, ran[0])]
        return min(same, key=lambda row: (len(row.candidate.options), row.candidate != self.space.asked), default=None)

    # What fits ---------------------------------------------------------------------------------------------------

    def _row(self, candidate: Candidate) -> Row:
        return self.rows.setdefault(candidate, Row(candidate))

    def _plan(self, candidate: Candidate) -> Row:
        """A row with what plan says of it, if it can be planned."""
        row = self._row(candidate)
        if row.planned or row.state:
            return row

        def make() -> dict[str, Any]:
            self._check_time()
            try:
                plan = self.predict(self.space.change(candidate))
            except LitEfficientError as error:
                return {"state": "refused", "reason": str(error)}
            except Exception as error:  # a network that cannot be planned may run all the same
                return {"reason": f"not planned: {type(error).__name__}: {error}"}
            return {"planned": int(plan.peak), "flops": float(plan.flops or 0)}

        for name, value in self.ledger.result(f"plan {candidate.name}", make).items():
            setattr(row, name, value)
        if row.planned > self.limit:
            row.state = "too large"
            row.reason = f"plan: {format_bytes(row.planned)} of {format_bytes(self.limit)}"
        return row

    def _fits(self, candidate: Candidate) -> bool:
        """Whether it may run: neither plan nor a smaller batch of it says otherwise."""
        row = self._row(candidate)
        if not row.state and (smaller := self._too_large_below(candidate)):
            row.state, row.reason = "too large", f"{smaller.name} is"
        return self._plan(candidate).state in ("", "ran")

    def _too_large_below(self, candidate: Candidate) -> Candidate | None:
        """One that is too large and takes less: no larger batch, and every option of this one that saves."""
        saving = self._saving.intersection(candidate.options)
        large = (row.candidate for row in self.rows.values() if row.state == "too large")
        return next((one for one in large if one.batch <= candidate.batch and saving.issubset(one.options)), None)

    def _largest(self, options: Iterable[str]) -> Candidate | None:
        """The largest batch of a set of options that fits."""
        options = tuple(options)
        most = self.space.candidate(self.space.sizes[-1], options)
        if self._fits(most):
            return most
        size = largest_fitting(self.space.sizes[:-1], lambda size: self._fits(self.space.candidate(size, options)))
        return None if size is None else self.space.candidate(size, options)

    # What is worth a run -----------------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        """Plan each option alone; leave those out that refuse the fit, save nothing or are not needed."""
        sizes = list(dict.fromkeys([self.space.sizes[-1], self.space.asked.batch]))
        for name, option in list(self.space.options.items()):
            for size in sizes:
                base, row = (self._plan(self.space.candidate(size, one)) for one in ((), (name,)))
                if row.state != "refused":
                    break
            else:
                self.space.leave_out(name, row.reason)
                continue
            more = row.flops / base.flops if row.flops and base.flops else 1.0
            self._flops[name] = math.log(more)
            if not (row.planned and base.planned) or row.planned < base.planned:
                self._saving.add(name)
            elif option.only_saves:
                self.space.leave_out(name, "it saves nothing here")
        self.every = self.space.candidates()
        self.say(
            f"{len(self.every)} candidates: {len(self.space.sizes)} batch sizes, {len(self.space.options)} options"
        )

    def _begin(self) -> None:
        """Run what tells most: the fit as it is, its other sizes, each option alone; of what fits with fewest options."""
        if self._fits(self.space.asked):
            self._run(self.space.asked)
        firsts: list[Candidate] = []
        sets = [one for one in self.space.sets() if self._saving.issuperset(one)]
        for _, alike in itertools.groupby(sets, key=len):
            firsts = [found for one in alike if (found := self._largest(one))]
            if firsts:
                break
        firsts = sorted(firsts, key=self._expected_flops)[:4]
        for first in firsts:
            slower, best = 0, math.inf
            for size in [size for size in reversed(self.space.sizes) if size <= first.batch]:
                row = self._run(self.space.candidate(size, first.options))
                slower = 0 if row.state == "ran" and row.cost < best else slower + 1
                best = min(best, row.cost if row.state == "ran" else math.inf)
                if slower == 2:
                    break
        if self._row(self.space.candidate(self.space.sizes[-1])).state == "ran":
            for name in [name for name, option in self.space.options.items() if option.only_saves]:
                if self._flops[name] > _CLOSE:
                    self.space.leave_out(name, "all fits without it, and it computes more")
        base = next((row.candidate for row in self.ran), None)
        for name in list(self.space.options) if base else ():
            if name not in base.options and self.space.go_together(options := (*base.options, name)):
                candidate = self.space.candidate(base.batch, options)
                if self._fits(candidate) and (row := self._run(candidate)).state == "failed":
                    self.space.leave_out(name, row.reason)
        self.every = self.space.candidates()

    def _next(self) -> Candidate | None:
        """The candidate that may be the fastest of those that are left; ``None`` where none may be."""
        if not self.ran:
            return None
        known = [row for row in self.rows.values() if row.state == "ran"]
        mean, deviation = self._expected(known, [row.cost for row in known])
        planned = [row for row in self.rows.values() if row.planned]
        unlikely = np.zeros(len(self.every), bool)
        if planned:
            peak, unsure = self._expected(planned, [math.log(row.planned) for row in planned], flops=False)
            unlikely = peak - 2 * unsure > math.log(self.limit)
        hopes = mean - deviation
        least = self.ran[0].cost + math.log1p(-_CLOSE)
        for index in np.argsort(hopes, kind="stable"):
            if hopes[index] > least:
                return None
            candidate = self.every[index]
            known_state = self.rows[candidate].state if candidate in self.rows else ""
            if not unlikely[index] and not known_state and self._fits(candidate):
                return candidate
        return None

    def _expected(self, rows: Sequence[Row], values: list[float], flops: bool = True) -> tuple[Any, Any]:
        """Mean and deviation of a value of all candidates, by those of some."""
        every, some = self._features(self.every), self._features([row.candidate for row in rows])
        of_flops = [self._expected_flops(row.candidate) if flops else 0.0 for row in rows]
        rest = np.array(values) - of_flops
        mean, deviation = process(some, rest, every)
        return mean + np.array([self._expected_flops(one) if flops else 0.0 for one in self.every]), deviation

    def _expected_flops(self, candidate: Candidate) -> float:
        return sum(self._flops.get(name, 0.0) for name in candidate.options)

    def _features(self, candidates: Sequence[Candidate]) -> Any:
        names = list(self.space.options)
        return np.array(
            [[math.log2(one.accumulation), *(name in one.options for name in names)] for one in candidates], float
        ).reshape(len(candidates), 1 + len(names))

    # Runs --------------------------------------------------------------------------------------------------------

    def _run(self, candidate: Candidate, rung: int = 0) -> Row:
        row = self._plan(candidate)
        if row.state not in ("", "ran") or (row.state == "ran" and not rung):
            return row
        steps = self.steps * 2**rung

        def make() -> dict[str, Any]:
            self._check_time()
            one = self.measure(self.space.change(candidate), steps)
            amount = statistics.fmean(one.amounts) if one.amounts else 0.0
            return {
                "failed": one.failed,
                "peak": one.peak,
                "unit": one.unit,
                "amount": amount,
                "seconds": list(one.timed),
            }

        found = self.ledger.result(f"run {candidate.name}, {steps} steps", make)
        row.peak, row.unit, row.amount = max(row.peak, found["peak"]), found["unit"], found["amount"]
        if found["failed"]:
            row.state = "too large" if "out of memory" in found["failed"].lower() else "failed"
            row.reason = found["failed"]
        elif row.peak > self.limit:
            row.state = "too large"
            row.reason = f"measured: {format_bytes(row.peak)} of {format_bytes(self.limit)}"
        elif not found["seconds"] or not row.amount:
            row.state, row.reason = "failed", "it made no step whose time counts"
        elif reason := self._other_batch(row):
            row.state, row.reason = "failed", reason
        else:
            row.state = "ran"
            row.seconds = [*row.seconds, *found["seconds"]]
        self._tell(row)
        return row

    def _other_batch(self, row: Row) -> str:
        """Why a step of this row has not what that of others has; a batch put together otherwise may have more."""
        chosen = [self.space.options[name] for name in row.candidate.options if name in self.space.options]
        if any(option.computes == "batches" for option in chosen):
            return ""
        unit, amount = self._usual = self._usual or (row.unit, row.amount)
        if unit == row.unit and 1 / _FAR_BATCH < row.amount / amount < _FAR_BATCH:
            return ""
        place = self.space.place[0] if self.space.place else "accumulate_grad_batches"
        return f"a step has {row.amount:g} {row.unit}, not {amount:g} {unit}: the loader does not follow {place}"

    def _run_on(self) -> None:
        """Run the best ones longer, until one is ahead."""
        for rung, most in enumerate(_RUNGS, start=1):
            ran = self.ran
            close = [row for row in ran[:most] if not _apart(row, ran[0], _NOISE)]
            if len(close) < 2:
                return
            for row in close:
                self._run(row.candidate, rung)

    def _check_time(self) -> None:
        if time.monotonic() - self._begun > self._seconds:
            raise _OutOfTime

    def _tell(self, row: Row) -> None:
        spent = time.monotonic() - self._begun
        what = f"{row.rate:.4g} {row.unit} a second" if row.state == "ran" else f"{row.state}: {row.reason}"
        left = f", at most {_clock(self._seconds - spent)} left" if self._seconds < math.inf else ""
        self.say(f"{len(self.tried)} of {len(self.every)} tried{left}: {row.candidate.name}: {what}")


def process(some: Any, values: Any, every: Any) -> tuple[Any, Any]:
    """Mean and deviation of a Gaussian process: a sum over options, a curve along the accumulation, and their products.

    Args:
        some: Features (n, 1 + options) of what is known: the logarithm of the accumulation, then 0 or 1 an option.
        values: What is known of these (n,).
        every: Features (m, 1 + options) of what is asked.
    """
    middle = values.mean()
    within = _covariance(some, some) + _NOISE**2 * np.eye(len(some))
    between = _covariance(every, some)
    solved = np.linalg.solve(within, np.column_stack([values - middle, between.T]))
    mean = middle + between @ solved[:, 0]
    own = _OPTION**2 * (1 + every[:, 1:].sum(1)) + _ACCUMULATION**2 + _TOGETHER**2
    return mean, np.sqrt(np.maximum(own - (between * solved[:, 1:].T).sum(1), 0.0))


def _covariance(a: Any, b: Any) -> Any:
    along = np.exp(-0.5 * ((a[:, None, 0] - b[None, :, 0]) / _OCTAVES) ** 2)
    shared = a[:, 1:] @ b[:, 1:].T
    apart = a[:, 1:].sum(1)[:, None] + b[:, 1:].sum(1)[None] - 2 * shared
    return _OPTION**2 * (1 + shared) + _ACCUMULATION**2 * along + _TOGETHER**2 * along * np.exp(-apart)


def _apart(slow: Row, fast: Row, least: float = _CLOSE) -> bool:
    """Whether one row is slower than another for certain, and by more than a little."""
    return slow.cost - fast.cost > max(least, 2 * math.hypot(slow.error, fast.error))


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d}"

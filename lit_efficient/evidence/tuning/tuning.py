"""The fastest way to run a fit within a memory, at the same effective batch, found by running few of all ways.

    log(seconds for a sample) = FLOPs + Gaussian process over (accumulation, options);    next: least mean - deviation

Each option is planned first: what refuses the fit, or saves nothing, is left out. What plan says does not fit never
runs, nor does what takes more. Of the rest those run, a few steps each, that may be the fastest by what is measured so
far. The best of them run longer, and of those that differ by no more than noise then the one that adds least is chosen.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_efficient.errors import LitEfficientError, check_number
from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.tuning.candidates import Candidate, Space
from lit_efficient.mechanisms.trials.batch_size import largest_fitting
from lit_efficient.mechanisms.trials.memory import format_bytes

if TYPE_CHECKING:  # which import Lightning
    from lit_efficient.evidence.measured_run import Measured

STEPS = 5  # that are timed in a first run; each later one has twice as many
_RUNGS = (4, 2)  # how many of the best run on in each
_STARTS = 4  # smallest sets of options that fit, if the fit as it is does not
_CLOSE = 0.01  # share of time below which two are the same
# Deviations of log time that are expected: of an option, along the accumulation, of options together, of a measurement.
_OPTION, _ACCUMULATION, _TOGETHER, _NOISE = 0.3, 0.3, 0.1, 0.02
_OCTAVES = 2.0  # of accumulation, over which time changes
_OTHER = 1.5  # times as much in a step: the loader does not follow the setting
Predict = Callable[[Change], tuple[int, float]]  # bytes at the peak of a step, and its operations
Measure = Callable[[Change, int], "Measured"]  # with the steps that are to be timed


@dataclass
class Row:
    """What is known of a candidate."""

    candidate: Candidate
    state: str = ""  # ``ran``, ``too large``, ``refused``, ``failed`` or an empty string before any of it
    reason: str = ""  # why it did not run, or failed
    planned: int = 0  # bytes at the peak of a step by plan; 0 where there is no plan
    flops: float = 0.0  # of an optimizer step, by plan
    peak: int = 0  # measured bytes; 0 where they cannot be seen
    seconds: list[float] = field(default_factory=list)  # of each timed step
    amount: float = 0.0  # samples or tokens of a step
    unit: str = ""  # which of them

    @property
    def cost(self) -> float:
        """Logarithm of the seconds for one sample or token."""
        return math.log(statistics.median(self.seconds) / self.amount)

    @property
    def rate(self) -> float:
        """Samples or tokens a second; 0 where it did not run."""
        return math.exp(-self.cost) if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of :attr:`cost`."""
        logs = [math.log(one) for one in self.seconds]
        middle = statistics.median(logs)
        spread = 1.4826 * statistics.median(abs(one - middle) for one in logs)
        return 1.2533 * spread / math.sqrt(len(logs))

    def slower(self, other: "Row", least: float = _CLOSE) -> bool:
        """Whether it is slower than another for certain, and by more than a little."""
        return self.cost - other.cost > max(least, 2 * math.hypot(self.error, other.error))


class Ledger:
    """Results by what was asked, a line each in a file, if any: what is there already is not done again.

    The key tells one search from another in the same file.
    """

    def __init__(self, file: Path | None = None, key: str = "") -> None:
        self.file, self.key = file, key
        self._known: dict[str, dict[str, Any]] = {}
        for line in file.read_text("utf-8").splitlines() if file and file.is_file() else ():
            try:
                record = json.loads(line)
                if record["search"] == key:
                    self._known[record["asked"]] = dict(record["result"])
            except (ValueError, KeyError, TypeError):  # torn when its writer was killed
                continue

    def result(self, asked: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of before, or a new one."""
        if asked not in self._known:
            self._known[asked] = make()
            if self.file is not None:
                record = {"search": self.key, "asked": asked, "result": self._known[asked]}
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps(record)}")  # a torn line ends here
        return self._known[asked]


class _OutOfTime(Exception):
    """Nothing new may begin."""


class Search:
    """A search for the fastest candidate.

    ``predict`` plans a change, and its refusals are errors of this package; ``measure`` runs one. A step may take
    ``limit`` bytes, a first run has so many timed ``steps``, after so many ``seconds`` nothing new begins, and ``say``
    hears how far it is.
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
        self.ledger, self.say, self.seconds = Ledger() if ledger is None else ledger, say, seconds
        self.rows: dict[Candidate, Row] = {}
        self.every = space.candidates()
        self.complete = False
        self._begun = time.monotonic()
        self._flops: dict[str, float] = {}  # of an option: the logarithm of how many times as many
        self._saving: set[str] = set()  # options that take memory off
        self._usual: tuple[str, float] | None = None  # what a step has

    def run(self) -> "Search":
        """Search; what is known when time is over counts."""
        try:
            self._leave_out()
            self._begin()
            while (candidate := self._next()) is not None:
                self._run(candidate)
            for rung, most in enumerate(_RUNGS, start=1):
                close = [row for row in self.ran[:most] if not row.slower(self.ran[0], _NOISE)]
                for row in close if len(close) > 1 else ():
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
        """How many were run, whatever came of it."""
        return sum(bool(row.amount) or row.state == "failed" for row in self.rows.values())

    @property
    def best(self) -> Row | None:
        """The fastest; of those within the noise of it the one that adds least. ``None``: nothing fits."""
        ran = self.ran
        same = [row for row in ran if not row.slower(ran[0])]
        return min(same, key=lambda row: (len(row.candidate.options), row.candidate != self.space.asked), default=None)

    # What fits --------------------------------------------------------------------------------------------------------

    def _plan(self, candidate: Candidate) -> Row:
        """A row with what plan says of it, if it can be planned."""
        row = self.rows.setdefault(candidate, Row(candidate))
        if row.planned or row.state:
            return row

        def make() -> dict[str, Any]:
            self._check_time()
            try:
                planned, flops = self.predict(self.space.change(candidate))
            except LitEfficientError as error:
                return {"state": "refused", "reason": str(error)}
            except Exception as error:  # what cannot be planned may run all the same
                return {"reason": f"not planned: {type(error).__name__}: {error}"}
            return {"planned": planned, "flops": flops}

        for name, value in self.ledger.result(f"plan {candidate}", make).items():
            setattr(row, name, value)
        if row.planned > self.limit:
            row.state, row.reason = "too large", f"plan: {format_bytes(row.planned)}"
        return row

    def _fits(self, candidate: Candidate) -> bool:
        """Whether it may run: neither plan nor one that takes less says otherwise."""
        row = self.rows.setdefault(candidate, Row(candidate))
        saving = self._saving.intersection(candidate.options)
        large = [one.candidate for one in self.rows.values() if one.state == "too large" and not row.state]
        less = [one for one in large if one.batch <= candidate.batch and saving.issubset(one.options)]
        if less:
            row.state, row.reason = "too large", f"{less[0]} is"
        return self._plan(candidate).state in ("", "ran")

    def _largest(self, options: Sequence[str]) -> Candidate | None:
        """The largest batch of a set of options that fits."""
        sizes = self.space.sizes
        if self._fits(most := self.space.candidate(sizes[-1], options)):
            return most
        size = largest_fitting(sizes[:-1], lambda size: self._fits(self.space.candidate(size, options)))
        return None if size is None else self.space.candidate(size, options)

    # What is worth a run ----------------------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        """Plan each option alone; leave those out that refuse the fit, or save nothing."""
        for name, option in list(self.space.options.items()):
            for size in dict.fromkeys([self.space.sizes[-1], self.space.asked.batch]):
                base, row = (self._plan(self.space.candidate(size, one)) for one in ((), (name,)))
                if row.state != "refused":
                    break
            self._flops[name] = math.log(row.flops / base.flops) if row.flops and base.flops else 0.0
            if row.state == "refused":
                self.space.leave_out(name, row.reason)
            elif not (row.planned and base.planned) or row.planned < base.planned:
                self._saving.add(name)
            elif option.only_saves:
                self.space.leave_out(name, "it saves nothing here")
        sizes, options = len(self.space.sizes), len(self.space.options)
        self.every = self.space.candidates()
        self.say(f"{len(self.every)} candidates: {sizes} batch sizes, {options} options")

    def _begin(self) -> None:
        """Run what tells most: the fit as it is, its other sizes, each option alone, or what makes it fit."""
        if self._fits(self.space.asked):
            self._run(self.space.asked)
        sets = [one for one in self.space.sets() if self._saving.issuperset(one)]
        alike = ([found for one in group if (found := self._largest(one))] for _, group in itertools.groupby(sets, len))
        for first in sorted(next(filter(None, alike), []), key=self._known_flops)[:_STARTS]:
            slower, best = 0, math.inf
            for size in [size for size in reversed(self.space.sizes) if size <= first.batch]:
                row = self._run(self.space.candidate(size, first.options))
                cost = row.cost if row.state == "ran" else math.inf
                slower, best = (0, cost) if cost < best else (slower + 1, best)
                if slower == 2:
                    break
        if (largest := self.rows.get(self.space.candidate(self.space.sizes[-1]))) and largest.state == "ran":
            for name in [name for name, one in self.space.options.items() if one.only_saves]:
                if self._flops[name] > _CLOSE:
                    self.space.leave_out(name, "all fits without it, and it computes more")
        for base in [row.candidate for row in self.ran[:1]]:
            for name in [name for name in self.space.options if name not in base.options]:
                candidate = self.space.candidate(base.batch, [*base.options, name])
                fits = self.space.go_together(candidate.options) and self._fits(candidate)
                if fits and (row := self._run(candidate)).state == "failed":
                    self.space.leave_out(name, row.reason)
        self.every = self.space.candidates()

    def _next(self) -> Candidate | None:
        """The candidate that may be the fastest of those that are left; ``None`` where none may be."""
        if not (ran := self.ran):
            return None
        flops = np.array([self._known_flops(one) for one in self.every])
        mean, deviation = self._expected(ran, [row.cost - self._known_flops(row.candidate) for row in ran])
        hopes = mean + flops - deviation
        likely = np.ones(len(self.every), bool)
        if planned := [row for row in self.rows.values() if row.planned]:
            peak, unsure = self._expected(planned, [math.log(row.planned) for row in planned])
            likely = peak - 2 * unsure < math.log(self.limit)
        for index in np.argsort(hopes, kind="stable"):
            if hopes[index] > ran[0].cost - _CLOSE:
                return None
            candidate = self.every[index]
            new = candidate not in self.rows or not self.rows[candidate].state
            if likely[index] and new and self._fits(candidate):
                return candidate
        return None

    def _expected(self, rows: Sequence[Row], values: Sequence[float]) -> tuple[Any, Any]:
        """Mean and deviation of a value of every candidate, by those of some."""
        names = list(self.space.options)

        def features(candidates: Sequence[Candidate]) -> Any:
            found = [[math.log2(one.accumulation), *(name in one.options for name in names)] for one in candidates]
            return np.array(found, float).reshape(len(candidates), 1 + len(names))

        return process(features([row.candidate for row in rows]), np.array(values), features(self.every))

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
            if one.late:  # more time may help
                raise _OutOfTime
            found = {"amount": statistics.fmean(one.amounts or [0]), "unit": one.unit, "peak": one.peak}
            return {**found, "seconds": list(one.timed), "failed": one.failed}

        found = self.ledger.result(f"run {candidate}, {steps} steps", make)
        row.peak, row.unit, row.amount = max(row.peak, found["peak"]), found["unit"], found["amount"]
        failed = found["failed"] or self._doubtful(row, found["seconds"])
        if "out of memory" in failed.lower() or row.peak > self.limit:
            row.state, row.reason = "too large", failed or f"measured: {format_bytes(row.peak)}"
        elif failed:
            row.state, row.reason = "failed", failed
        else:
            row.state, row.seconds = "ran", [*row.seconds, *found["seconds"]]
        spent = time.monotonic() - self._begun
        what = f"{row.rate:.4g} {row.unit} a second" if row.state == "ran" else f"{row.state}: {row.reason}"
        left = f", at most {_clock(self.seconds - spent)} left" if self.seconds < math.inf else ""
        self.say(f"{self.tried} of {len(self.every)} tried{left}: {candidate}: {what}")
        return row

    def _doubtful(self, row: Row, seconds: list[float]) -> str:
        """Why the time of a run says nothing: a step has not what others have, unless its batches are other ones."""
        if not seconds or not row.amount:
            return "it made no step whose time counts"
        chosen = [self.space.options[name].computes for name in row.candidate.options if name in self.space.options]
        unit, amount = self._usual = self._usual or (row.unit, row.amount)
        if "batches" in chosen or (unit == row.unit and 1 / _OTHER < row.amount / amount < _OTHER):
            return ""
        place = self.space.place[0] if self.space.place else "accumulate_grad_batches"
        return f"a step has {row.amount:g} {row.unit}, not {amount:g} {unit}: the loader does not follow {place}"

    def _check_time(self) -> None:
        if time.monotonic() - self._begun > self.seconds:
            raise _OutOfTime


def process(some: Any, values: Any, every: Any) -> tuple[Any, Any]:
    """Mean and deviation of a Gaussian process: a sum over options, a curve along the accumulation, and their products.

    Features are the logarithm of the accumulation, then 0 or 1 an option: (n, 1 + options) of what is known, whose
    ``values`` are (n,), and (m, 1 + options) of what is asked.
    """
    within = _covariance(some, some) + _NOISE**2 * np.eye(len(some))
    between = _covariance(every, some)
    solved = np.linalg.solve(within, np.column_stack([values - values.mean(), between.T]))
    own = _OPTION**2 * (1 + every[:, 1:].sum(1)) + _ACCUMULATION**2 + _TOGETHER**2
    deviation = np.sqrt(np.maximum(own - (between * solved[:, 1:].T).sum(1), 0.0))
    return values.mean() + between @ solved[:, 0], deviation


def _covariance(a: Any, b: Any) -> Any:
    along = np.exp(-0.5 * ((a[:, None, 0] - b[None, :, 0]) / _OCTAVES) ** 2)
    shared = a[:, 1:] @ b[:, 1:].T
    apart = a[:, 1:].sum(1)[:, None] + b[:, 1:].sum(1)[None] - 2 * shared
    return _OPTION**2 * (1 + shared) + _ACCUMULATION**2 * along + _TOGETHER**2 * along * np.exp(-apart)


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d}"

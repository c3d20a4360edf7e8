"""Schedule of a comparison: its runs, their order, and when they end.

A round runs every variant once. The order rotates from round to round, so that changes in the load of the machine
affect all variants alike. The first rounds are whole trainings with different seeds. Short runs follow until the
intervals of all time ratios are narrow, or the time is over.
"""

import datetime
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import Callback

from lit_efficient import __version__
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.evidence.comparing.comparison import BASELINE, Comparison
from lit_efficient.evidence.comparing.comparison_rows import Row, Rows, metric_of, results, time_ratio
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.evidence.measured_run import WARM_UP, measured
from lit_efficient.evidence.own_process import TaskFailed, own_process, plan_seconds
from lit_efficient.evidence.planning.plan import plan
from lit_efficient.evidence.run_watch import warm_up

_TIMED = 12  # timed steps of a short run
_LEAST_ROUNDS = 6  # with fewer, an interval that is narrow by chance ends the runs too often
_MOST_ROUNDS = 40  # more hardly narrow an interval
_REPORT_SECONDS = 15  # between lines of progress in a run


@dataclass(frozen=True)
class Schedule:
    """Amount of runs. The arguments are those of :func:`~.compare.compare`."""

    steps: int = 100
    seeds: int = 3
    minutes: float = 10.0
    validations: int = 10
    narrow: float | None = 0.05
    cpu_time: bool = False

    def __post_init__(self) -> None:
        check_number("compare", "steps", self.steps, least=3, whole=True)  # two are not timed
        check_number("compare", "seeds", self.seeds, least=1, whole=True)
        check_number("compare", "validations", self.validations, least=0, whole=True)
        check_number("compare", "minutes", self.minutes, above=0)
        check_number("compare", "narrow", self.narrow, above=0, null=True)

    @property
    def length(self) -> int:
        """Steps of a training: a multiple of ``validations``, so that the last step is followed by a validation."""
        each = max(1, self.validations)
        if self.steps <= each:
            return self.steps
        return -(-self.steps // each) * each


class Comparing:
    """The runs of a comparison. Only those that are missing in its folder are made.

    Args:
        source: Makes the fit.
        changes: The changes to compare.
        schedule: Amount of runs.
        folder: Folder of the runs; ``None`` takes one below ``runs/compare``, named by a hash of the comparison.
        elsewhere: Function that creates other held-out data.
        said: Function that receives lines of progress.
        alone: Run no combination of changes, and leave out the changes that are refused.
        planner: Makes the fit to be planned; ``None`` takes ``source``.
    """

    def __init__(
        self,
        source: FitSource,
        changes: Sequence[Change],
        schedule: Schedule,
        folder: Path | None = None,
        elsewhere: Callable[[], object] | None = None,
        said: Callable[[str], None] = lambda line: None,
        alone: bool = False,
        planner: FitSource | None = None,
    ) -> None:
        self.source = source
        self.schedule = schedule
        self.elsewhere = elsewhere
        self.said = said
        self.planner = planner or source
        self.variants = {one.name: one for one in variants(changes, alone)}
        self.alone = alone
        settings = {
            "fit": _hash(source.identity()),
            "steps": schedule.length,
            "validations": schedule.validations,
            "code": source.code(),
            "clock": "CPU time" if schedule.cpu_time else "time",
            "forgetting": _hash(f"{getattr(elsewhere, '__qualname__', '')}{getattr(elsewhere, 'args', '')}"),
            "versions": {"lit_efficient": __version__, "torch": version("torch"), "lightning": version("lightning")},
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        }
        self.about = json.loads(json.dumps(settings))  # as it is read back from the folder
        self.folder = folder or Path("runs", "compare", _hash(json.dumps(self.about))[:12])
        self.rows = Rows(self.folder, self.about)
        # A variant is identified by its changes, so that a new definition under an old name runs again.
        self.keys = {name: _hash(f"{name}\n{source.identity(one)}") for name, one in self.variants.items()}
        self._costs: dict[tuple[str, bool], float] = {}  # seconds of the last run, by variant and whether it is whole
        self._guess: float | None = None  # seconds of a whole run, by the first steps of the first one
        self._late: dict[str, Row] = {}  # runs that took too long: another call may have time for them

    def run(self) -> None:
        """Make the missing runs, until the intervals are narrow or the time is over.

        Raises:
            KeyboardInterrupt: If the user interrupts. Runs that have ended are kept.
        """
        self._end = time.monotonic() + 60 * self.schedule.minutes
        if self.rows.rows:
            self.said(f"{self.folder} has {len(self.rows.rows)} runs already, which are used; delete it to begin anew")
        for turn in range(max(self.schedule.seeds, _MOST_ROUNDS)):
            # The trainings of all seeds are made in any case, since losses need them.
            if turn >= self.schedule.seeds and self.settled:
                return
            # A variant that failed would fail again.
            names = self._alive()
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                if self._has(name, turn):
                    continue
                if not self._has_time(name, turn):
                    return
                self._make(name, turn)
                if self.refused:
                    return

    @property
    def settled(self) -> bool:
        """True if the intervals of all time ratios are narrow, or if there are none."""
        names = self._alive()
        narrow = self.schedule.narrow
        if BASELINE not in names or narrow is None:
            return True
        baseline, *others = [self.rows.of(self.keys[name]) for name in names]
        ratios = [time_ratio(rows, baseline) for rows in others]
        return all(ratio.n >= _LEAST_ROUNDS and ratio.width <= narrow for ratio in ratios)

    def result(self, metric: str | None = None, command: str = "") -> Comparison:
        """Return the results of all runs in the folder.

        Args:
            metric: The metric to compare, as in :func:`~.compare.compare`.
            command: The command that made the comparison.
        """
        rows = {}
        left_out = {}
        for name, key in self.keys.items():
            found = self.rows.of(key)
            if not found and name in self._late:
                found = [self._late[name]]
            if self.alone and name != BASELINE and _refused(found):
                left_out[name] = found[0].run.failed
            else:
                rows[name] = found
        every = [row for found in rows.values() for row in found]
        metric = metric_of(every, metric)
        about = {
            **self.about,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": next((row.run.device for row in every if row.run.device), ""),
            "seeds": self.schedule.seeds,
            "narrow": self.schedule.narrow,
            "settled": self.settled,
            "metrics": sorted({logged for row in every for logged in row.run.held_out}),
        }
        if left_out:
            about["left_out"] = left_out
        return Comparison(command, about, metric, results(rows, metric, self.schedule.narrow is not None))

    @property
    def refused(self) -> bool:
        """True if the unchanged fit is refused. A fit that runs out of memory is not refused."""
        return _refused(self.rows.of(self.keys[BASELINE]))

    def _alive(self) -> list[str]:
        """Return the variants of which no run has failed."""
        failed = {row.key for row in self.rows.rows if row.run.failed}
        return [name for name, key in self.keys.items() if key not in failed and name not in self._late]

    def _is_whole(self, turn: int) -> bool:
        return turn < self.schedule.seeds

    def _has(self, name: str, turn: int) -> bool:
        made = [(row.round, row.whole) for row in self.rows.of(self.keys[name])]
        return (turn, self._is_whole(turn)) in made

    def _has_time(self, name: str, turn: int) -> bool:
        return self._end - time.monotonic() >= self._costs.get((name, self._is_whole(turn)), 0.0)

    def _make(self, name: str, turn: int) -> None:
        """Make one run and store it."""
        whole = self._is_whole(turn)
        seed = turn % self.schedule.seeds
        if whole:
            title = f"{name}, seed {seed}"
            steps = self.schedule.length
            validations = self.schedule.validations
            elsewhere = self.elsewhere
        else:
            title = f"{name}, round {turn + 1}"
            steps = min(self.schedule.length, WARM_UP + _TIMED)
            validations = 0
            elsewhere = None
        begun = time.monotonic()
        reported = begun
        first: tuple[int, float] | None = None  # a step after the warm-up, and its time

        def heard(step: int) -> None:
            nonlocal reported, first
            now = time.monotonic()
            if whole and self._guess is None and step >= warm_up(steps):
                first = first or (step, now)
                # The steps between have their share of the validations.
                if step - first[0] >= max(1, steps // validations if validations else 1):
                    each = (now - first[1]) / (step - first[0])
                    self._guess = now - begun + (steps - step) * each
                    reported = now
                    self.said(self._estimate(self._guess))
            if now - reported > _REPORT_SECONDS:
                reported = now
                self.said(f"{title}: step {step} of {steps}; {self._time_left(turn)}")

        # A failure is a result too, and is stored so that it is not repeated.
        found = measured(
            self.source,
            replace(self.variants[name], name=name),
            steps=steps,
            seed=seed,
            validations=validations,
            counts=turn == 0,
            elsewhere=elsewhere,
            log=self.folder / f"{self.keys[name][:12]}.log",
            heard=heard,
            most_seconds=60 * self.schedule.minutes,
            cpu_time=self.schedule.cpu_time,
        )
        self._costs[name, whole] = time.monotonic() - begun
        if whole and self._guess is None and not found.failed:  # too short for an estimate from its steps
            self._guess = self._costs[name, whole]
            self.said(self._estimate(self._guess))
        row = Row(self.keys[name], turn, whole, found)
        # A plan is the same in each round.
        if turn == 0 and not found.failed:
            row.planned = self._planned(name)
        if found.late:
            self._late[name] = row
        else:
            self.rows.add(row)
        self.said(f"{title}: {self._outcome(name, row)}; {self._time_left(turn)}")

    def _estimate(self, seconds: float) -> str:
        """Return the time of all missing trainings, each of which takes so many seconds."""
        count = sum(not self._has(name, seed) for name in self._alive() for seed in range(self.schedule.seeds))
        text = (
            f"compare: {count} trainings of {self.schedule.length} steps, each about {seconds:.3g} s, take about "
            f"{count * seconds / 60:.1f} min"
        )
        if count * seconds > 60 * self.schedule.minutes:
            return f"{text}, and none begins after {self.schedule.minutes:g} min: give more minutes or fewer steps"
        if self.schedule.narrow is not None:
            return f"{text}; short runs that compare times follow, until {self.schedule.minutes:g} min have passed"
        return text

    def _planned(self, name: str) -> int | None:
        seconds = plan_seconds(self.schedule.minutes)
        try:
            return int(own_process(_peak, self.planner, self.variants[name], most_seconds=seconds))
        except TaskFailed:
            return None

    def _outcome(self, name: str, row: Row) -> str:
        if row.run.failed:
            word = "refused" if row.run.refused else "failed"
            return f"{word}: {row.run.failed[:160]}"
        seconds = row.run.step_time
        text = f"{seconds * 1000:.3g} ms a step" if seconds < 1 else f"{seconds:.1f} s a step"
        ratio = time_ratio(self.rows.of(row.key), self.rows.of(self.keys[BASELINE]))
        if name != BASELINE and ratio.n:
            text += f", {ratio.value:.2f} of the baseline's"
        return text

    def _time_left(self, turn: int) -> str:
        """Return an estimate of the time that the whole trainings need, or without any the time that is left."""
        budget = max(0.0, self._end - time.monotonic())
        known = [seconds for (_, whole), seconds in self._costs.items() if whole] or [self._guess or 0.0]
        mean = sum(known) / len(known)
        need = 0.0
        for name in self._alive():
            missing = sum(not self._has(name, each) for each in range(self.schedule.seeds))
            need += missing * self._costs.get((name, True), mean)
        if self._is_whole(turn) and need:
            budget = min(budget, need)
        return f"at most {budget / 60:.1f} min left"


def variants(changes: Sequence[Change], alone: bool = False) -> list[Change]:
    """Return the variants: the unchanged fit, each change, all changes, and all changes but one.

    Args:
        changes: The changes. From two on all are combined, from three on all but each, unless they give one setting
            several values.
        alone: Combine none.

    Raises:
        ConfigurationError: If there are no changes, or two variants have the same name.
    """
    found = [Change(BASELINE), *changes]
    keys = [key for one in changes for key in one.settings]
    alone = alone or len({*keys}) < len(keys)
    if len(changes) > 1 and not alone:
        found.append(together("all", changes))
    if len(changes) > 2 and not alone:
        for one in changes:
            found.append(together(f"all but {one.name}", [other for other in changes if other is not one]))
    names = [one.name for one in found]
    if not changes or "" in names or len(set(names)) < len(names):
        allowed = f"one or more changes with different names, other than {BASELINE!r} and 'all'"
        raise refusal("compare", "with", allowed, [one.name for one in changes])
    return found


def together(name: str, changes: Sequence[Change]) -> Change:
    """Return several changes as one."""
    settings: dict[str, object] = {}
    overlays: list[str] = []
    for one in changes:
        settings.update(one.settings)
        overlays += one.overlays

    def callbacks() -> list[Callback]:
        return [callback for one in changes for callback in one.callbacks()]

    return Change(name, settings, tuple(overlays), callbacks)


def _peak(source: FitSource, change: Change, tell: Callable[[int], None]) -> int:
    found = plan(source, change)
    for note in found.notes:
        # The plan leaves out callbacks that it cannot trace. Its peak is not that of the run then.
        if "did not take part" in note:
            raise ConfigurationError(note)
    return found.peak


def _refused(rows: Sequence[Row]) -> bool:
    return bool(rows) and all(row.run.refused for row in rows)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

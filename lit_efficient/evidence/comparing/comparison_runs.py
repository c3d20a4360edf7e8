"""The schedule of a comparison: which runs are made, in which order, until when.

A round runs every variant once, in an order that turns from round to round: what the machine does meanwhile befalls all
alike. The first rounds train as long as is asked, each with a seed of its own; after them short ones follow until all
intervals of the ratios of times are narrow, or the time is over.
"""

import datetime
import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lit_efficient import __version__
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.evidence.comparing.comparison import BASELINE, Comparison
from lit_efficient.evidence.comparing.comparison_rows import Row, Rows, metric_of, results, time_ratio
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.evidence.measured_run import WARM_UP, measured
from lit_efficient.evidence.own_process import TaskFailed, own_process, plan_seconds
from lit_efficient.evidence.planning.plan import plan

_TIMED = 12  # steps of a run that is there for its time alone
_ROUNDS = 6, 40  # with fewer one that is narrow by chance ends the runs too often, with more it hardly narrows


@dataclass(frozen=True)
class Schedule:
    """How much is run; arguments as in :func:`compare`."""

    steps: int = 100
    seeds: int = 3
    minutes: float = 10.0
    validations: int = 10
    narrow: float | None = 0.05
    cpu_time: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            check_number("compare", name, getattr(self, name), least=1, whole=True)
        check_number("compare", "validations", self.validations, least=0, whole=True)
        check_number("compare", "minutes", self.minutes, above=0)
        check_number("compare", "narrow", self.narrow, above=0, null=True)

    @property
    def length(self) -> int:
        """Steps of a training, after the last of which it can be validated."""
        each = max(1, self.validations)
        return self.steps if self.steps <= each else -(-self.steps // each) * each


class Comparing:
    """The runs of a comparison of a fit as it is and changed, of those that are missing in a folder.

    Without one they have a folder of their own below ``runs/compare``. ``elsewhere`` makes other held-out data,
    ``said`` gets the progress, ``alone`` leaves out all together and all but one, and ``planner`` makes the fit for its
    plan.
    """

    def __init__(
        self,
        source: FitSource,
        changes: Sequence[Change],
        schedule: Schedule,
        folder: Path | None = None,
        elsewhere: Callable[[], Any] | None = None,
        said: Callable[[str], None] = lambda line: None,
        alone: bool = False,
        planner: FitSource | None = None,
    ) -> None:
        self.source, self.schedule, self.elsewhere, self.said = source, schedule, elsewhere, said
        self.planner = planner or source
        self.variants = {one.name: one for one in variants(changes, alone)}
        self.alone = alone
        settled = {
            "fit": _sum(source.identity()),
            "steps": schedule.length,
            "validations": schedule.validations,
            "code": source.code(),
            "clock": "CPU time" if schedule.cpu_time else "time",
            "forgetting": _sum(f"{getattr(elsewhere, '__qualname__', '')}{getattr(elsewhere, 'args', '')}"),
            "versions": {"lit_efficient": __version__, **{name: version(name) for name in ("torch", "lightning")}},
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        }
        self.about = json.loads(json.dumps(settled))
        self.folder = folder if folder is not None else Path("runs", "compare", _sum(json.dumps(self.about))[:12])
        self.rows = Rows(self.folder, self.about)
        self.keys = {name: _sum(f"{name}\n{source.identity(one)}") for name, one in self.variants.items()}
        self._costs: dict[tuple[str, bool], float] = {}  # seconds of the last run, with the start of its process
        self._lost: dict[str, Row] = {}  # runs that another call may have time for

    def run(self) -> None:
        """Run what is missing, until the intervals are narrow or the time is over.

        Raises:
            KeyboardInterrupt: As it comes; the runs that have ended are kept.
        """
        self._end = time.monotonic() + 60 * self.schedule.minutes
        if self.rows.rows:
            self.said(f"{self.folder} has {len(self.rows.rows)} runs already, which count; without it all begins anew")
        for turn in range(max(self.schedule.seeds, _ROUNDS[1])):
            if turn >= self.schedule.seeds and self.settled:
                return
            names = self._alive
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                if not self._has(name, turn) and not (self._one(name, turn) and not self.refused):
                    return

    @property
    def settled(self) -> bool:
        """Whether all intervals of ratios are narrow, or there are none."""
        narrow = self.schedule.narrow
        if BASELINE not in self._alive or narrow is None:
            return True
        baseline, *others = (self.rows.of(self.keys[name]) for name in self._alive)
        ratios = [time_ratio(rows, baseline) for rows in others]
        return all(ratio.n >= _ROUNDS[0] and ratio.width <= narrow for ratio in ratios)

    def result(self, metric: str | None = None, command: str = "") -> Comparison:
        """What all runs in the folder say of these variants; those that are refused from the start are left out."""
        rows = {name: self.rows.of(key) or [*filter(None, [self._lost.get(name)])] for name, key in self.keys.items()}
        left_out = {name: found[0].run.failed for name, found in rows.items() if self.alone and _refused(found)}
        rows = {name: found for name, found in rows.items() if name not in left_out or name == BASELINE}
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
            **({"left_out": left_out} if left_out else {}),
        }
        return Comparison(command, about, metric, results(rows, metric, self.schedule.narrow is not None))

    @property
    def refused(self) -> bool:
        """Whether there is no fit to compare with; one that memory is too small for is one."""
        return _refused(self.rows.of(self.keys[BASELINE]))

    def _has(self, name: str, turn: int) -> bool:
        whole = turn < self.schedule.seeds
        return any((row.round, row.whole) == (turn, whole) for row in self.rows.of(self.keys[name]))

    @property
    def _alive(self) -> list[str]:
        """Variants none of whose runs has failed."""
        failed = {row.key for row in self.rows.rows if row.run.failed}
        return [name for name, key in self.keys.items() if key not in failed and name not in self._lost]

    def _one(self, name: str, turn: int) -> bool:
        """Make one run; says whether there was time for it."""
        whole, left = turn < self.schedule.seeds, self._end - time.monotonic()
        if left < self._costs.get((name, whole), 0.0):
            return False
        begun, seed = time.monotonic(), turn % self.schedule.seeds
        title = f"{name}, {f'seed {seed}' if whole else f'round {turn + 1}'}"
        last = begun

        def heard(step: int) -> None:
            nonlocal last
            if time.monotonic() - last > 15:
                last = time.monotonic()
                self.said(f"{title}: step {step} of {steps}; {self._time_left(turn)}")

        steps = self.schedule.length if whole else min(self.schedule.length, WARM_UP + _TIMED)
        found = measured(
            self.source,
            replace(self.variants[name], name=name),
            steps=steps,
            seed=seed,
            validations=self.schedule.validations if whole else 0,
            counts=turn == 0,
            elsewhere=self.elsewhere if whole else None,
            log=self.folder / f"{self.keys[name][:12]}.log",
            heard=heard,
            most_seconds=60 * self.schedule.minutes,
            cpu_time=self.schedule.cpu_time,
        )
        self._costs[name, whole] = time.monotonic() - begun
        row = Row(self.keys[name], turn, whole, found, self._planned(name) if turn == 0 and not found.failed else None)
        if found.late:
            self._lost[name] = row  # more time may help
        else:
            self.rows.add(row)
        self.said(f"{title}: {self._outcome(name, row)}; {self._time_left(turn)}")
        return True

    def _planned(self, name: str) -> int | None:
        try:
            most = plan_seconds(self.schedule.minutes)
            return int(own_process(_peak, self.planner, self.variants[name], most_seconds=most))
        except TaskFailed:
            return None

    def _outcome(self, name: str, row: Row) -> str:
        if row.run.failed:
            return f"{'refused' if row.run.refused else 'failed'}: {row.run.failed[:160]}"
        ratio = time_ratio(self.rows.of(row.key), self.rows.of(self.keys[BASELINE]))
        beside = f", {ratio.value:.2f} of the baseline's" if name != BASELINE and ratio.n else ""
        return f"{row.run.step_time * 1000:.3g} ms a step{beside}"

    def _time_left(self, turn: int) -> str:
        """How long what must be run takes, at most as long as there is time."""
        names, budget = self._alive, max(0.0, self._end - time.monotonic())
        known = [seconds for (_, whole), seconds in self._costs.items() if whole] or [0.0]
        mean, need = sum(known) / len(known), 0.0
        for name in names:
            missing = sum(not self._has(name, each) for each in range(self.schedule.seeds))
            need += missing * self._costs.get((name, True), mean)
        seconds = min(budget, need) if turn < self.schedule.seeds and need else budget
        return f"at most {seconds / 60:.1f} min left"


def variants(changes: Sequence[Change], alone: bool = False) -> list[Change]:
    """The fit as it is, each change, of two or more all together, of three or more all but each.

    Raises:
        ConfigurationError: If there is no change, or two have the same name.
    """
    found = [Change(BASELINE), *changes]
    if len(changes) > 1 and not alone:
        found.append(together("all", changes))
    if len(changes) > 2 and not alone:
        found += [together(f"all but {one.name}", [other for other in changes if other is not one]) for one in changes]
    names = [one.name for one in found]
    if not changes or len({"", *names}) <= len(names):
        allowed = "names of what is compared, each another one, and none of " + ", ".join(map(repr, (BASELINE, "all")))
        raise refusal("compare", "with", allowed, [one.name for one in changes])
    return found


def together(name: str, changes: Sequence[Change]) -> Change:
    """Several changes as one."""
    return Change(
        name,
        {key: value for one in changes for key, value in one.settings.items()},
        tuple(itertools.chain.from_iterable(one.overlays for one in changes)),
        lambda: [callback for one in changes for callback in one.callbacks()],
    )


def _peak(source: FitSource, change: Change, tell: Callable[[int], None]) -> int:
    found = plan(source, change)
    if left := [note for note in found.notes if "did not take part" in note]:
        raise ConfigurationError(left[0])
    return found.peak


def _refused(rows: Sequence[Row]) -> bool:
    return bool(rows) and all(row.run.refused for row in rows)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

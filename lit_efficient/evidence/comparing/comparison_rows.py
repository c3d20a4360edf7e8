"""The runs of a comparison, kept as they end, and what they say together."""

import contextlib
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.comparing.comparison import TRAINING_LOSS, VariantResult
from lit_efficient.evidence.comparing.estimates import Estimate, holm, looked_at, mean_of, ratio_of
from lit_efficient.evidence.run_watch import Measured

ROWS, ABOUT = "rows.jsonl", "about.json"
_POINTS = 16  # of the curve of a training loss
_Curve = list[tuple[int, float, float]]  # step, seconds, loss


@dataclass
class Row:
    """One run."""

    key: str  # what tells its variant from all others, of whatever name
    round: int  # of the schedule; runs of one round are compared in time
    whole: bool  # whether it trains and validates as long as was asked; else it is there for its time alone
    run: Measured  # what was measured
    planned: int | None = None  # what `plan` predicts for the peak; ``None`` where it was not asked, or cannot


class Rows:
    """The runs of a comparison, in a file to which each is added when it ends.

    Raises:
        ConfigurationError: If the folder holds another comparison than ``about`` tells.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, known = folder / ROWS, folder / ABOUT
        self.rows: list[Row] = []
        if known.is_file():
            before = _read(known.read_text("utf-8")) or {}
            others = [name for name, value in about.items() if before.get(name) != value]
            if others:
                raise ConfigurationError(
                    f"compare: {folder} holds another comparison (its {', '.join(others)} differ): give another folder"
                )
        elif self.file.is_file():
            raise ConfigurationError(f"compare: {folder} has {ROWS} without {ABOUT}: give another folder")
        else:
            known.write_text(json.dumps(about, indent=1), "utf-8")
        for line in self.file.read_text("utf-8").splitlines() if self.file.is_file() else ():
            if record := _read(line):
                self.rows.append(Row(**{**record, "run": Measured.of(record["run"])}))

    def add(self, row: Row) -> None:
        """Keep a run."""
        self.rows.append(row)
        with self.file.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
                file.write(b"\n" if torn else b"")
            file.write(json.dumps(asdict(row)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, key: str) -> list[Row]:
        """The runs of a variant."""
        found = [row for row in self.rows if row.key == key]
        return list({(row.round, row.whole): row for row in found}.values())  # two at once may make the same run


def _read(text: str) -> dict[str, Any] | None:
    """An object; ``None`` of what was cut when the machine stopped."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def time_ratio(rows: Sequence[Row], baseline: Sequence[Row]) -> Estimate:
    """The ratio of two variants' median steps, paired by round."""
    plain, mine = ({(r.round, r.whole): r.run.step_time for r in side if not r.run.failed} for side in (baseline, rows))
    pairs = [(seconds, plain[key]) for key, seconds in mine.items() if key in plain]
    return ratio_of([a for a, _ in pairs], [b for _, b in pairs])


def results(rows: Mapping[str, Sequence[Row]], metric: str, stops: bool = False) -> list[VariantResult]:
    """What runs say of each variant, the baseline first; ``stops``: rounds ended at narrow intervals of times."""
    first = next(iter(rows))
    found = [_result(name, runs, rows[first], metric) for name, runs in rows.items()]
    for one in found:
        one.peak_ratio = one.peak / found[0].peak if one.peak and found[0].peak else math.nan
    for question in ("time", "loss", "loss_at_time", "steps_to_loss", "time_to_loss", "forgetting"):
        answers = {one.name: answer for one in found[1:] if (answer := getattr(one, question)) is not None}
        if stops and question == "time":
            answers = {name: looked_at(answer) for name, answer in answers.items()}
        corrected = holm(answers)
        for one in found[1:]:
            setattr(one, question, corrected.get(one.name))
        if (own := getattr(found[0], question)) is not None:
            setattr(found[0], question, replace(own, p=None))
    return found


def metric_of(rows: Sequence[Row], wanted: str | None) -> str:
    """What is compared: the metric that is wanted, or the validation loss, or where there is none the training loss.

    Raises:
        ConfigurationError: If the one that is wanted is not logged by the validation.
    """
    logged = sorted({name for row in rows for name in row.run.held_out})
    if wanted is not None and logged and wanted not in (*logged, TRAINING_LOSS):
        raise ConfigurationError(f"compare: the validation logs no {wanted!r}, but {', '.join(logged)}")
    named = [name for name in ("val/loss", "val_loss") if name in logged]
    return wanted or next(iter([*named, *(name for name in logged if "loss" in name)]), TRAINING_LOSS)


def _result(name: str, rows: Sequence[Row], baseline: Sequence[Row], metric: str) -> VariantResult:
    good = [row for row in rows if not row.run.failed]
    if not good:
        stopped = any(row.run.refused for row in baseline)
        missing = "not run: the fit as it is is refused" if stopped else "not run yet: the same command goes on"
        reason = next((row.run.failed for row in rows), missing)
        return VariantResult(name, failed=reason)
    whole = {row.run.seed: row.run for row in good if row.whole}
    plain = {row.run.seed: row.run for row in baseline if row.whole and not row.run.failed}
    seeds = [seed for seed in plain if seed in whole]
    curves = {seed: curve_of(whole[seed], metric) for seed in whole}
    others = {seed: curve_of(plain[seed], metric) for seed in plain}
    counted = [row.run for row in good if row.run.checkpoint_bytes or row.run.peak]
    latest = counted[-1] if counted else good[-1].run
    pairs = [(curves[seed], others[seed]) for seed in seeds if curves[seed] and others[seed]]
    final = [curve[-1][2] for curve in curves.values() if curve]
    gained, others_gained = (_gained([side[seed] for seed in seeds], metric) for side in (whole, plain))
    steps, seconds = (_reached(pairs, axis) for axis in (0, 1))
    return VariantResult(
        name,
        time=time_ratio(good, baseline),
        rate=replace(mean_of([row.run.rate for row in good]), p=None),
        unit=latest.unit,
        step_seconds=statistics.median(row.run.step_time for row in good),
        peak=latest.peak,
        kinds=latest.kinds,
        planned=next((row.planned for row in good if row.planned is not None), None),
        checkpoint_bytes=latest.checkpoint_bytes,
        trainable=latest.trainable,
        final_loss=statistics.fmean(final) if final else math.nan,
        loss=_difference([_at_the_end(a, b, 0) for a, b in pairs]),
        loss_at_time=_difference([_at_the_end(a, b, 1) for a, b in pairs]),
        steps_to_loss=steps,
        time_to_loss=seconds,
        forgotten=statistics.fmean(gained) if gained else math.nan,
        forgetting=_difference(list(zip(gained, others_gained))) if gained and others_gained else None,
        curve=_middle(list(curves.values())),
        seeds=len(seeds),
        rounds=len(good),
        remarks=list(_remarks(rows, [(whole[seed], plain[seed]) for seed in seeds], list(curves.values()), metric)),
    )


def _remarks(
    rows: Sequence[Row], pairs: Sequence[tuple[Measured, Measured]], curves: Sequence[_Curve], metric: str
) -> Iterator[str]:
    failed = [row.run.failed for row in rows if row.run.failed]
    if failed:
        yield f"{len(failed)} of {len(rows)} runs failed, which stopped the others: {failed[0]}"
    early = [(mine.steps, other.steps) for mine, other in pairs if mine.steps != other.steps]
    if early:
        yield f"a training ended after {early[0][0]} steps, the baseline's after {early[0][1]}"
    if lost := sum(not math.isfinite(curve[-1][2]) for curve in curves if curve):
        yield f"{metric} is no number at the end of {lost} of {len(curves)} trainings"


def curve_of(run: Measured, metric: str) -> _Curve:
    """A run's metric by step and by seconds of training; of a training loss the means of some stretches."""
    if metric != TRAINING_LOSS:
        return run.held_out.get(metric, [])
    width = max(1, run.steps // _POINTS)
    ends = range(run.steps, 0, -width)
    points = ((end, run.losses[max(0, end - width) : end]) for end in reversed(ends))
    return [(end, sum(run.seconds[:end]), statistics.fmean(losses)) for end, losses in points]


def _middle(curves: Sequence[_Curve]) -> _Curve:
    """The median over runs, where all have a point at a step."""
    by_step: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for curve in curves:
        for step, seconds, loss in curve:
            by_step[step].append((seconds, loss))
    whole = {step: points for step, points in by_step.items() if len(points) == len(curves)}
    return [(step, *(statistics.median(values) for values in zip(*whole[step]))) for step in sorted(whole)]


def _difference(pairs: Sequence[tuple[float, float]]) -> Estimate:
    found = mean_of([a - b for a, b in pairs])
    return replace(found, p=None) if _seeds_say_nothing(pairs) and found.value else found


def _seeds_say_nothing(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether runs of all seeds are the same but for rounding: then they are one run, and no evidence of anything."""
    sides = [[pair[i] for pair in pairs] for i in (0, 1)]
    return all(len(side) > 1 and max(side) - min(side) <= 1e-5 * max(map(abs, side)) for side in sides)


def _at_the_end(a: _Curve, b: _Curve, axis: int) -> tuple[float, float]:
    """Both losses after the steps (axis 0) or seconds (1) of whichever is done first."""
    end = min(a[-1][axis], b[-1][axis])
    return _at(a, end, axis), _at(b, end, axis)


def _at(curve: _Curve, place: float, axis: int) -> float:
    for before, after in pairwise(curve):
        if before[axis] <= place <= after[axis]:
            share = (place - before[axis]) / ((after[axis] - before[axis]) or 1)
            return before[2] + (after[2] - before[2]) * share
    return curve[-1][2] if place >= curve[-1][axis] else math.nan  # nothing is known before the first point


def _reached(pairs: Sequence[tuple[_Curve, _Curve]], axis: int) -> Estimate | None:
    """Steps (axis 0) or seconds (1) until each first curve is as low as the second is at its end."""
    ends = [(_first(a, b[-1][2], axis), _first(b, b[-1][2], axis)) for a, b in pairs]
    if not ends or any(a is None or b is None for a, b in ends):
        return None
    found = ratio_of([float(a or 0) for a, _ in ends], [float(b or 0) for _, b in ends])
    return replace(found, p=None) if _seeds_say_nothing([(a[-1][2], b[-1][2]) for a, b in pairs]) else found


def _first(curve: _Curve, loss: float, axis: int) -> float | None:
    before: tuple[int, float, float] | None = None
    for point in curve:
        if point[2] <= loss:
            if before is None:
                return float(point[axis])
            share = (before[2] - loss) / (before[2] - point[2])
            return before[axis] + (point[axis] - before[axis]) * share
        before = point
    return None


def _gained(runs: Sequence[Measured], metric: str) -> list[float]:
    """What the loss on other held-out data is higher by after each run; nothing where one has none."""
    names = sorted(set.intersection(*(set(run.elsewhere) for run in runs))) if runs else []
    if not names:
        return []
    name = metric if metric in names else next((name for name in names if "loss" in name), names[0])
    return [run.elsewhere[name][1] - run.elsewhere[name][0] for run in runs]

"""Runs of a comparison, stored as they end, and the results that follow from them."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.comparing.comparison import COMPARED, TRAINING_LOSS, VariantResult
from lit_efficient.evidence.comparing.comparison_tables import NOT_RUN
from lit_efficient.evidence.comparing.estimates import Estimate, holm, looked_at, mean_of, ratio_of
from lit_efficient.evidence.json_lines import append_record, records
from lit_efficient.evidence.run_watch import Measured

ROWS = "rows.jsonl"
ABOUT = "about.json"
_POINTS = 16  # of the curve of a training loss
_Curve: TypeAlias = list[tuple[int, float, float]]  # step, seconds of training, loss
_STEP = 0
_SECONDS = 1
_LOSS = 2


@dataclass
class Row:
    """One run."""

    key: str  # identifies the variant, whatever its name is
    round: int  # of the schedule; times are compared between runs of one round
    whole: bool  # False for a short run that measures times only
    run: Measured  # the measurements
    planned: int | None = None  # peak that `plan` predicts; ``None`` without a prediction


class Rows:
    """The runs of a comparison, in a file to which each run is appended when it ends.

    Raises:
        ConfigurationError: If the folder holds a comparison with another ``about``.
    """

    def __init__(self, folder: Path, about: Mapping[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / ROWS
        known = folder / ABOUT
        if known.is_file():
            before = json.loads(known.read_text("utf-8"))
            others = [name for name, value in about.items() if before.get(name) != value]
            if others:
                raise ConfigurationError(
                    f"compare: {folder} holds another comparison, which differs in {', '.join(others)}: choose another "
                    "folder"
                )
        elif self.file.is_file():
            raise ConfigurationError(f"compare: {folder} has {ROWS} but no {ABOUT}: choose another folder")
        else:
            known.write_text(json.dumps(about, indent=1), "utf-8")
        self.rows = [Row(**{**record, "run": Measured.of(record["run"])}) for record in records(self.file)]

    def add(self, row: Row) -> None:
        """Store a run."""
        self.rows.append(row)
        append_record(self.file, asdict(row))

    def of(self, key: str) -> list[Row]:
        """Return the runs of a variant."""
        # Two processes that share a folder may make the same run.
        return list({(row.round, row.whole): row for row in self.rows if row.key == key}.values())


def time_ratio(rows: Sequence[Row], baseline: Sequence[Row]) -> Estimate:
    """Return the ratio of the median step times of two variants, paired by round."""
    plain = {(row.round, row.whole): row.run.step_time for row in baseline if not row.run.failed}
    mine = {(row.round, row.whole): row.run.step_time for row in rows if not row.run.failed}
    # A pair of the same round was measured in the same conditions.
    both = mine.keys() & plain.keys()
    return ratio_of([mine[key] for key in sorted(both)], [plain[key] for key in sorted(both)])


def results(rows: Mapping[str, Sequence[Row]], metric: str, stops: bool = False) -> list[VariantResult]:
    """Return the result of each variant.

    Args:
        rows: Runs by the name of the variant, the baseline first.
        metric: Metric to compare.
        stops: True if the rounds ended because the intervals of times were narrow.
    """
    plain = next(iter(rows.values()))
    baseline, *others = found = [_result(name, runs, plain, metric) for name, runs in rows.items()]
    for one in found:
        if one.peak and baseline.peak:
            one.peak_ratio = one.peak / baseline.peak
    for question in COMPARED:
        answers = {one.name: getattr(one, question) for one in others if getattr(one, question) is not None}
        if stops and question == "time":
            answers = {name: looked_at(answer) for name, answer in answers.items()}
        # All variants are tested together, so p is corrected for their number.
        corrected = holm(answers)
        for one in others:
            setattr(one, question, corrected.get(one.name))
        # A comparison of the baseline with itself is no test.
        own = getattr(baseline, question)
        if own is not None:
            setattr(baseline, question, replace(own, p=None))
    return found


def metric_of(rows: Sequence[Row], wanted: str | None) -> str:
    """Return the metric to compare: ``wanted``, or the validation loss, or without one the training loss.

    Raises:
        ConfigurationError: If the validation does not log the wanted metric.
    """
    logged = sorted({name for row in rows for name in row.run.held_out})
    if wanted is None:
        losses = [name for name in logged if "loss" in name]
        named = [name for name in ("val/loss", "val_loss") if name in logged]
        return [*named, *losses, TRAINING_LOSS][0]
    if logged and wanted not in (*logged, TRAINING_LOSS):
        raise ConfigurationError(f"compare: the validation does not log {wanted!r}; it logs {', '.join(logged)}")
    return wanted


def _result(name: str, rows: Sequence[Row], baseline: Sequence[Row], metric: str) -> VariantResult:
    good = [row for row in rows if not row.run.failed]
    if not good:
        if rows:
            return VariantResult(name, failed=rows[0].run.failed)
        if any(row.run.refused for row in baseline):
            return VariantResult(name, failed=f"{NOT_RUN}: the unchanged fit is refused")
        return VariantResult(name, failed=f"{NOT_RUN} yet: the same command continues")
    whole = {row.run.seed: row.run for row in good if row.whole}
    plain = {row.run.seed: row.run for row in baseline if row.whole and not row.run.failed}
    pairs = [(whole[seed], plain[seed]) for seed in plain if seed in whole]
    all_curves = [curve_of(run, metric) for run in whole.values()]
    final = [curve[-1][_LOSS] for curve in all_curves if curve]
    curves = [(curve_of(mine, metric), curve_of(other, metric)) for mine, other in pairs]
    curves = [(mine, other) for mine, other in curves if mine and other]
    # Bytes are counted in the first round only.
    counted = [row.run for row in good if row.run.checkpoint_bytes or row.run.peak]
    latest = [good[-1].run, *counted][-1]
    gained = _gained([mine for mine, _ in pairs], metric)
    others_gained = _gained([other for _, other in pairs], metric)
    found = VariantResult(
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
        loss=_difference([_at_the_end(mine, other, _STEP) for mine, other in curves]),
        loss_at_time=_difference([_at_the_end(mine, other, _SECONDS) for mine, other in curves]),
        steps_to_loss=_reached(curves, _STEP),
        time_to_loss=_reached(curves, _SECONDS),
        curve=_middle(all_curves),
        seeds=len(pairs),
        rounds=len(good),
        remarks=list(_remarks(rows, pairs, all_curves, metric)),
    )
    if final:
        found.final_loss = statistics.fmean(final)
    if gained:
        found.forgotten = statistics.fmean(gained)
    if gained and others_gained:
        found.forgetting = _difference(list(zip(gained, others_gained)))
    return found


def _remarks(
    rows: Sequence[Row], pairs: Sequence[tuple[Measured, Measured]], curves: Sequence[_Curve], metric: str
) -> Iterator[str]:
    failed = [row.run.failed for row in rows if row.run.failed]
    if failed:
        yield f"{len(failed)} of {len(rows)} runs failed, which stopped the others: {failed[0]}"
    for mine, other in pairs:
        if mine.steps != other.steps:
            yield f"a training ended after {mine.steps} steps, the baseline's after {other.steps}"
            break
    lost = sum(not math.isfinite(curve[-1][_LOSS]) for curve in curves if curve)
    if lost:
        yield f"{metric} is not finite at the end of {lost} of {len(curves)} trainings"


def curve_of(run: Measured, metric: str) -> _Curve:
    """Return a run's metric by step and by seconds of training. A training loss is averaged over groups of steps."""
    if metric != TRAINING_LOSS:
        return run.held_out.get(metric, [])
    # The loss of a single batch is too noisy to be compared.
    width = max(1, run.steps // _POINTS)
    curve = []
    for end in range(run.steps, 0, -width):
        losses = run.losses[max(0, end - width) : end]
        curve.append((end, sum(run.seconds[:end]), statistics.fmean(losses)))
    return curve[::-1]


def _middle(curves: Sequence[_Curve]) -> _Curve:
    """Return the median over runs, at the steps at which every run has a point."""
    by_step: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for curve in curves:
        for step, seconds, loss in curve:
            by_step[step].append((seconds, loss))
    middle = []
    for step, points in sorted(by_step.items()):
        # A median over the remaining runs would jump where a run ends.
        if len(points) == len(curves):
            times, losses = zip(*points)
            middle.append((step, statistics.median(times), statistics.median(losses)))
    return middle


def _difference(pairs: Sequence[tuple[float, float]]) -> Estimate:
    found = mean_of([mine - other for mine, other in pairs])
    if found.value and _seeds_have_no_effect(pairs):
        return replace(found, p=None)
    return found


def _seeds_have_no_effect(pairs: Sequence[tuple[float, float]]) -> bool:
    """True if the runs of all seeds are equal up to rounding. They count as one run, which is no evidence."""
    return all(len(side) > 1 and max(side) - min(side) <= 1e-5 * max(map(abs, side)) for side in zip(*pairs))


def _at_the_end(mine: _Curve, other: _Curve, axis: int) -> tuple[float, float]:
    """Return both losses at the end of the shorter curve, by steps or by seconds."""
    end = min(mine[-1][axis], other[-1][axis])
    losses = []
    for curve in (mine, other):
        # Before its first point a curve is unknown.
        places = [point[axis] for point in curve]
        losses.append(float(np.interp(end, places, [point[_LOSS] for point in curve], left=math.nan)))
    return losses[0], losses[1]


def _reached(pairs: Sequence[tuple[_Curve, _Curve]], axis: int) -> Estimate | None:
    """Return the ratio of the steps, or seconds, until both curves are as low as the second is at its end."""
    mine = [_first(one, other[-1][_LOSS], axis) for one, other in pairs]
    others = [_first(other, other[-1][_LOSS], axis) for _, other in pairs]
    # A ratio over some of the seeds would favour variants that fail with the others.
    if not pairs or not all(math.isfinite(place) for place in (*mine, *others)):
        return None
    found = ratio_of(mine, others)
    if _seeds_have_no_effect([(one[-1][_LOSS], other[-1][_LOSS]) for one, other in pairs]):
        return replace(found, p=None)
    return found


def _first(curve: _Curve, loss: float, axis: int) -> float:
    """Return the first place at which a curve is as low as ``loss``; infinity if it never is."""
    if curve[0][_LOSS] <= loss:
        return float(curve[0][axis])
    for before, after in pairwise(curve):
        if after[_LOSS] <= loss:
            share = (before[_LOSS] - loss) / (before[_LOSS] - after[_LOSS])
            return before[axis] + (after[axis] - before[axis]) * share
    return math.inf


def _gained(runs: Sequence[Measured], metric: str) -> list[float]:
    """Return the increase of the loss on other held-out data in each run; empty if a run has no such data."""
    if not runs:
        return []
    names = sorted(set.intersection(*(set(run.elsewhere) for run in runs)))
    if not names:
        return []
    name = metric
    if metric not in names:
        # The other data may log other metrics than the validation.
        name = [*[name for name in names if "loss" in name], *names][0]
    return [run.elsewhere[name][1] - run.elsewhere[name][0] for run in runs]

"""Report of one or several runs: a page of HTML that needs neither a network nor JavaScript."""

import base64
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lit_efficient.evidence.reporting.line_chart import COLOURS, Line, line_figure, number
from lit_efficient.evidence.reporting.pages import rendered
from lit_efficient.evidence.reporting.run_record import RunRecord

# First bytes of every report. A file without them is not overwritten.
MARK = Markup("<!doctype html><!-- a report of lit_efficient -->")
_MOST_SAMPLES = 8  # pictures, and texts, that are shown of the runs together
_MOST_MEGABYTES = 4  # of a picture or text
_LONGEST = 200_000  # characters of a text
_UNKNOWN = "not known"
_TITLES = {
    "loss": "Loss",
    "reward": "Reward",
    "kl": "Divergence from the reference",
    "clipped": "Share of clipped ratios",
    "length": "Length of samples, tokens",
    "entropy": "Entropy",
    "shares": "Shares of samples",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens a second",
    "samples_per_second": "Samples a second",
    "memory": "Memory, GiB",
    "mfu": "Model FLOPs utilisation",
    "data_wait": "Share of time waiting for data",
}
# Metrics of `PolicyOptimization` that share a chart
_TOGETHER = {"reward": r"reward/.+", "clipped": r"clipped_\w+", "shares": r"truncated|empty|failed|equal_rewards"}


def page(runs: Sequence[RunRecord]) -> str:
    """Return the whole page."""
    several = len(runs) > 1
    names = [run.name for run in runs]
    title = ", ".join(names)
    if len(runs) > 2:
        title = f"{len(runs)} runs"
    return rendered(
        "run_page.html",
        mark=MARK.removeprefix("<!doctype html>"),
        title=title,
        runs=runs,
        names=["key", *names],
        several=several,
        facts=facts,
        alerts=[_alert(run) for run in runs],
        differences=_differences(runs),
        charts=list(_charts(runs)),
        samples=[list(_samples(run, _MOST_SAMPLES // min(len(runs), 2))) for run in runs],
        warnings=_warnings,
        checkpoints=_checkpoints,
        colours=COLOURS,
        longest=_LONGEST,
        most_megabytes=_MOST_MEGABYTES,
    )


def facts(run: RunRecord) -> dict[str, str]:
    """Return the main results of a run as text, the most wanted first."""
    # The names of metrics depend on the task, such as tokens_per_second.
    speed, speeds = run.values("per_second")
    _, peaks = run.values("peak_memory")
    _, waits = run.values("data_wait")
    found = {"Ended": run.ended or _UNKNOWN}
    if run.heard and not run.ended:
        heard = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.heard))
        found["Ended"] = f"not yet, or was killed after {heard}"
    if run.best is None:
        found["Best"] = _UNKNOWN
    else:
        metric, value, step = run.best
        found[f"Best {metric}"] = f"{number(value)} at step {step:,}"
    found |= {"Speed": _UNKNOWN, "Waited for data": _UNKNOWN, "Peak memory": _UNKNOWN}
    if speeds:
        unit = speed.rpartition("/")[2].removesuffix("_per_second")
        found["Speed"] = f"{number(statistics.median_high(speeds))} {unit} a second"
    if waits:
        found["Waited for data"] = f"{statistics.fmean(waits):.1%} of the time"
    if peaks:
        found["Peak memory"] = f"{number(max(peaks))} GiB"
    found["Trained"] = f"{run.step:,} steps"
    if run.seconds:
        found["Trained"] += f" in {_duration(run.seconds)}"
    return found


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"


def _alert(run: RunRecord) -> str:
    """Return a warning about losses that are not finite; empty if there are none."""
    text = ""
    if run.ended_not_finite or "diverged" in run.ended.lower():
        text = " diverged"
    if run.not_finite is not None:
        name, steps = run.not_finite
        text += f": {name} was not finite at step {steps[0]:,}, and {len(steps)} times in all"
    return text and f"{run.name}{text}"


def _differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row for each key of configs and environments whose values differ between runs."""
    rows: list[list[str]] = []
    for settings in ([run.config for run in runs], [run.environment for run in runs]):
        absent = ""
        for key in dict.fromkeys(key for values in settings for key in values):
            cells = [values.get(key, "–") for values in settings]
            # A part that some runs lack gets one row, without its own keys.
            if len(set(cells)) > 1 and not (absent and key.startswith(absent)):
                rows.append([key, *cells])
                absent = ""
                if "–" in cells:
                    absent = f"{key}."
    return rows


def chart_of(metric: str) -> str:
    """Return the chart of a metric. Training and validation share one, and so do all learning rates and memories."""
    if re.match(r"lr\b", metric):
        return "lr"
    if "memory" in metric:
        return "memory"
    name = re.sub(r"^(train|val|valid|validation|test)[/_]|_(step|epoch)$", "", metric)
    for chart, members in _TOGETHER.items():
        if re.fullmatch(members, name):
            return chart
    return name


def _charts(runs: Sequence[RunRecord]) -> Iterator[Markup]:
    several = len(runs) > 1
    charts: dict[tuple[str, str], list[Line]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        # Several runs share a chart for each metric; one run has a chart for each group of metrics.
        lines = charts.setdefault((chart_of(name), name if several else ""), [])
        for place, run in enumerate(runs):
            points = list(run.metrics.get(name, {}).items())
            if points and several:
                lines.append(Line(place % COLOURS, run.name, points))
            elif points:
                lines.append(Line(len(lines) % COLOURS, name, points))
    order = list(_TITLES)

    def rank(key: tuple[str, str]) -> float:
        # Charts that have no title of their own follow the loss.
        return order.index(key[0]) if key[0] in order else 0.5

    for chart, metric in sorted(charts, key=rank):
        title = _TITLES.get(chart, f"{chart[:1].upper()}{chart[1:].replace('_', ' ')}")
        from_zero = "per_second" in chart or chart in ("memory", "data_wait")
        lines = charts[chart, metric]
        for start in range(0, len(lines), COLOURS):
            yield line_figure(title, metric, lines[start : start + COLOURS], from_zero=from_zero)


@dataclass(frozen=True)
class _Sample:
    step: int
    path: Path
    image: str = ""  # as a data URI
    text: str | None = None


@dataclass(frozen=True)
class _Samples:
    """Samples of one kind of file."""

    suffix: str
    count: int  # number of files
    shown: list[_Sample]


def _samples(run: RunRecord, most: int) -> Iterator[_Samples]:
    """Yield at most ``most`` pictures and as many texts, evenly spread over the run."""
    for suffix in (".png", ".txt"):
        found = [sample for sample in run.samples if sample[1].suffix == suffix]
        count = min(most, len(found))
        # The first and the last sample are always shown.
        places = {round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)}
        if found:
            yield _Samples(suffix, len(found), [_sample(*found[place]) for place in sorted(places)])


def _sample(step: int, path: Path) -> _Sample:
    content = b""
    try:
        if path.stat().st_size <= _MOST_MEGABYTES * 1_000_000:
            content = path.read_bytes()
    except OSError:  # the sample is shown as unreadable
        pass
    # Only content that is a picture may become one, whatever its name is.
    if content.startswith(b"\x89PNG"):
        return _Sample(step, path, image="data:image/png;base64," + base64.b64encode(content).decode())
    if path.suffix == ".txt":
        return _Sample(step, path, text=content.decode(errors="replace")[:_LONGEST])
    return _Sample(step, path)


def _warnings(run: RunRecord) -> list[tuple[str, str]]:
    return [(text, f"{count} times") for text, count in run.warnings.items()]


def _checkpoints(run: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return a row for each file; the last checkpoint in a file counts."""
    rows = {}
    for step, path, monitor, score in run.checkpoints:
        text = ""
        if monitor:
            text = number(score)
        rows[path] = (path, f"{step:,}", monitor, text)
    return list(rows.values())

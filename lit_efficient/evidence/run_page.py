"""The report of one or several runs: a page of HTML that needs nothing else, neither network nor JavaScript."""

import base64
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_efficient.evidence.line_chart import COLOURS, Point, line_figure, number
from lit_efficient.evidence.markup import Markup, document, escaped, grid, joined, table, tag
from lit_efficient.evidence.run_record import RunRecord

MARK = "<!doctype html><!-- a report of lit_efficient -->"
_MOST_SAMPLES, _MOST_BYTES, _LONGEST = 8, 4_000_000, 200_000  # of a run; of a picture; characters of a text
_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens a second",
    "samples_per_second": "Samples a second",
    "memory": "Memory, GiB",
    "mfu": "Model FLOPs utilisation",
    "data_wait": "Share of time waiting for data",
}


def page(runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    title = ", ".join(run.name for run in runs)
    several = len(runs) > 1
    sections = {
        "": grid("runs", *(_summary(run, place, several) for place, run in enumerate(runs))),
        "What differs": _differences(runs) if several else Markup(),
        "Curves, by optimizer step": grid("grid", *_curves(runs)),
        "Samples": grid("runs", *(_of(run, several, *_samples(run, several)) for run in runs)),
        "What each technique touched": joined(*(_of(run, several, table(run.techniques)) for run in runs)),
        "More": joined(*(_of(run, several, _details(run)) for run in runs)),
    }
    heads = (joined(tag("h2", name) if name else "", content) for name, content in sections.items() if content)
    alerts = (_alert(run) for run in runs)
    return MARK + document(title, tag("h1", title if len(runs) < 3 else f"{len(runs)} runs"), *alerts, *heads)


def facts(run: RunRecord) -> dict[str, str]:
    """What one asks first, in the order in which one asks."""
    best, steps = run.best, f"{run.step:,} steps"
    heard = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.heard))
    speed, speeds = run.values("per_second")
    _, peaks = run.values("peak_memory")
    _, waits = run.values("data_wait")
    unit = speed.rpartition("/")[2].removesuffix("_per_second")
    return {
        "Ended": run.ended or (f"not yet, or was killed after {heard}" if run.heard else "not known"),
        f"Best {best[0]}" if best else "Best": f"{number(best[1])} at step {best[2]:,}" if best else "not known",
        "Speed": f"{number(sorted(speeds)[len(speeds) // 2])} {unit} a second" if speeds else "not known",
        "Waited for data": f"{sum(waits) / len(waits):.1%} of the time" if waits else "not known",
        "Peak memory": f"{number(max(peaks))} GiB" if peaks else "not known",
        "Trained": steps + (f" in {_duration(run.seconds)}" if run.seconds else ""),
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _alert(run: RunRecord) -> Markup:
    name, steps, to_the_end = run.not_finite or ("", [], False)
    diverged = to_the_end or "diverged" in run.ended.lower()
    where = f": {name} was not finite at step {steps[0]:,}, and {len(steps)} times in all" if steps else ""
    return tag("p", run.name, " diverged" * diverged, where, class_="card alert") if diverged or steps else Markup()


def _summary(run: RunRecord, place: int, several: bool) -> Markup:
    rows = (tag("div", tag("dt", name), tag("dd", text)) for name, text in facts(run).items())
    return tag(
        "section",
        tag("h3", run.name, class_=f"key line{place % COLOURS}") if several else "",
        tag("dl", *rows),
        tag("p", f"Resumed {run.starts - 1} times.") if run.starts > 1 else "",
        tag("p", "Started from ", tag("code", run.parent)) if run.parent else "",
        joined(tag("p", "Next:"), *(tag("pre", command, class_="command") for command in run.next)) if run.next else "",
        class_="card",
    )


def _of(run: RunRecord, several: bool, *content: Markup) -> Markup:
    """What a run has to show, under its name where there are several."""
    return tag("div", tag("h3", run.name) if several else "", *content) if any(content) else Markup()


def _differences(runs: Sequence[RunRecord]) -> Markup:
    rows: list[list[str]] = []
    for each in ([run.config for run in runs], [run.environment for run in runs]):
        absent = ""  # what some runs lack goes without its parts
        for key in dict.fromkeys(key for values in each for key in values):
            cells = [values.get(key, "–") for values in each]
            if len(set(cells)) > 1 and not (absent and key.startswith(absent)):
                rows.append([key, *cells])
                absent = f"{key}." if "–" in cells else ""
    return table(rows, ["key", *(run.name for run in runs)]) or tag("p", "Neither config nor environment.")


def chart_of(metric: str) -> str:
    """The chart that a metric belongs to: one for training and validation, one for all rates, one for memory."""
    if re.match(r"lr\b", metric):
        return "lr"
    if "memory" in metric:
        return "memory"
    return re.sub(r"^(train|val|valid|validation|test)[/_]|_(step|epoch)$", "", metric)


def _curves(runs: Sequence[RunRecord]) -> Iterator[Markup]:
    several = len(runs) > 1
    charts: dict[tuple[str, str], list[tuple[int, str, Sequence[Point]]]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        lines = charts.setdefault((chart_of(name), name if several else ""), [])  # of several runs a chart each metric
        for place, run in enumerate(runs):
            if points := list(run.metrics.get(name, {}).items()):
                lines.append((place if several else len(lines), run.name if several else name, points))
    ranks = {name: place for place, name in enumerate(_TITLES)}
    for chart, metric in sorted(charts, key=lambda key: ranks.get(key[0], 0.5)):
        title = _TITLES.get(chart) or f"{chart[:1].upper()}{chart[1:].replace('_', ' ')}"
        for start in range(0, len(charts[chart, metric]), COLOURS):
            part = charts[chart, metric][start : start + COLOURS]
            from_zero = "per_second" in chart or chart in ("memory", "data_wait")
            yield line_figure(title, metric, part, from_zero=from_zero)


def _samples(run: RunRecord, several: bool) -> Iterator[Markup]:
    for suffix in (".png", ".txt"):
        found = [sample for sample in run.samples if sample[1].suffix == suffix]
        count = min(_MOST_SAMPLES // (2 if several else 1), len(found))
        places = sorted({round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)})
        chosen = (found[place] for place in places)
        figures = (tag("figure", tag("figcaption", f"step {step:,}"), _sample(step, path)) for step, path in chosen)
        yield grid("stack" if several else "grid", *figures)
        if len(places) < len(found):
            yield tag("p", f"{len(places)} of {len(found)} *{suffix} in {run.folder / 'samples'}")


def _sample(step: int, path: Path) -> Markup:
    try:
        content = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
    except OSError:
        content = b""
    if content.startswith(b"\x89PNG"):
        source = "data:image/png;base64," + base64.b64encode(content).decode()
        return tag("img", src=source, alt=f"sample at step {step}")
    if path.suffix == ".txt":
        return tag("pre", content.decode(errors="replace")[:_LONGEST])
    return escaped(f"{path.name} is no PNG of up to {_MOST_BYTES / 1e6:.0f} MB")


def _details(run: RunRecord) -> Markup:
    rows = {
        path: (path, f"{step:,}", monitor, monitor and number(score)) for step, path, monitor, score in run.checkpoints
    }
    parts = {
        "Not known": tag("ul", *(tag("li", text) for text in run.missing)) if run.missing else "",
        "Warnings": table([(text, f"{count} times") for text, count in run.warnings.items()]),
        "Checkpoints": table([*rows.values()], ["file", "step", "metric", "score"]),
        "Environment": table([*run.environment.items()]),
        "Config": tag("pre", run.config_text[:_LONGEST]) if run.config_text else "",
        "Log": tag("pre", run.log[-_LONGEST:]) if run.log else "",
    }
    return joined(*(tag("details", tag("summary", name), part) for name, part in parts.items() if part))

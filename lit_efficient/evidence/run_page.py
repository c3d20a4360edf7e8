"""The report of one or several runs: a page of HTML that needs nothing else, neither network nor JavaScript."""

import base64
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_efficient.evidence.line_chart import COLOURS, line_chart, number
from lit_efficient.evidence.markup import Markup, escaped, joined, tag
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
    "data_wait": "Share of time waiting for data",
}


def page(runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    title = ", ".join(run.name for run in runs)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    several = len(runs) > 1
    sections = {
        "": tag("div", *(_summary(run, place, several) for place, run in enumerate(runs)), class_="runs"),
        "What differs": _differences(runs) if several else Markup(),
        "Curves, by optimizer step": tag("div", *_curves(runs), class_="grid"),
        "Samples": tag(
            "div", *(_of(run, several, *_samples(run, several)) for run in runs), class_="runs" if several else ""
        ),
        "What each technique touched": joined(*(_of(run, several, _table(run.techniques)) for run in runs)),
        "More": joined(*(_of(run, several, _details(run)) for run in runs)),
    }
    return MARK + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("title", title),
            tag("style", Markup(Path(__file__).with_suffix(".css").read_text("utf-8"))),
        ),
        tag(
            "body",
            tag("h1", title if len(runs) < 3 else f"{len(runs)} runs"),
            *(_alert(run) for run in runs),
            *(joined(tag("h2", name) if name else "", content) for name, content in sections.items() if content),
        ),
        lang="en",
    )


def facts(run: RunRecord) -> dict[str, str]:
    """What one asks first, in the order in which one asks."""
    best, steps = run.best, f"{run.step:,} steps"
    heard = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.heard))
    speed, speeds = run.values("_per_second")
    _, peaks = run.values("peak_memory")
    unit = speed.rpartition("/")[2].removesuffix("_per_second")
    return {
        "Ended": run.ended or (f"not yet, or was killed after {heard}" if run.heard else "not known"),
        f"Best {best[0]}" if best else "Best": f"{number(best[1])} at step {best[2]:,}" if best else "not known",
        "Speed": f"{number(sorted(speeds)[len(speeds) // 2])} {unit} a second" if speeds else "not known",
        "Peak memory": f"{number(max(peaks))} GiB" if peaks else "not known",
        "Trained": steps + (f" in {_duration(run.seconds)}" if run.seconds else ""),
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _alert(run: RunRecord) -> Markup:
    step = run.diverged_at
    if step is None and "diverged" not in run.ended.lower():
        return Markup()
    where = "" if step is None else f": a loss was not finite at step {step:,}"
    return tag("p", f"{run.name} diverged{where}.", class_="card alert")


def _summary(run: RunRecord, place: int, several: bool) -> Markup:
    told = tag("dl", *(tag("div", tag("dt", name), tag("dd", text)) for name, text in facts(run).items()))
    resumed = f"Resumed {run.starts - 1} times. " * (run.starts > 1) + f"It went on from {run.parent}." * bool(
        run.parent
    )
    return tag(
        "section",
        tag("h3", run.name, class_=f"key line{place % COLOURS}") if several else "",
        told,
        tag("p", resumed) if resumed else "",
        tag("pre", "\n".join(f"$ {command}" for command in run.next), aria_label="next") if run.next else "",
        class_="card",
    )


def _of(run: RunRecord, several: bool, *content: Markup) -> Markup:
    """What a run has to show, under its name where there are several."""
    return tag("div", tag("h3", run.name) if several else "", *content) if any(content) else Markup()


def _table(rows: Sequence[Sequence[object]], head: Sequence[object] = ()) -> Markup:
    if not rows:
        return Markup()
    first = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    body = (tag("tr", tag("th", row[0]), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return tag("div", tag("table", *first, *body), class_="card wide")


def _differences(runs: Sequence[RunRecord]) -> Markup:
    rows = []
    for each in ([run.config for run in runs], [run.environment for run in runs]):
        keys = dict.fromkeys(key for values in each for key in values)
        found = ([key, *(values.get(key, "–") for values in each)] for key in keys)
        rows += [row for row in found if len(set(row[1:])) > 1]
    return _table(rows, ["key", *(run.name for run in runs)]) or tag("p", "Neither config nor environment.")


def chart_of(metric: str) -> str:
    """The chart that a metric belongs to: one for training and validation, one for all rates, one for memory."""
    if re.match(r"lr\b", metric) or metric.startswith("lr-"):
        return "lr"
    if "memory" in metric:
        return "memory"
    return re.sub(r"^(train|val|valid|validation|test)[/_]|_(step|epoch)$", "", metric)


def _curves(runs: Sequence[RunRecord]) -> Iterator[Markup]:
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    charts: dict[tuple[str, str], list[tuple[str, int, RunRecord, str]]] = {}
    for name in names:
        for place, run in enumerate(runs):
            if name in run.metrics:
                key = (chart_of(name), name if len(runs) > 1 else "")  # of several runs a chart each metric
                label = run.name if len(runs) > 1 else name
                lines = charts.setdefault(key, [])
                lines.append((label, place if len(runs) > 1 else len(lines), run, name))
    order = list(_TITLES)
    ranked = sorted(charts, key=lambda key: (order.index(key[0]) or -1) if key[0] in order else 0)
    for chart, metric in ranked:
        plain = chart.replace("_", " ").strip() or metric
        title = joined(_TITLES.get(chart, plain[:1].upper() + plain[1:]), tag("small", f" {metric}") if metric else "")
        lines = charts[chart, metric]
        for start in range(0, len(lines), COLOURS):
            part = lines[start : start + COLOURS]
            keys = (
                tag(
                    "span", f"{label} {number([*run.metrics[name].values()][-1])}", class_=f"key line{colour % COLOURS}"
                )
                for label, colour, run, name in part
            )
            drawn = line_chart(
                chart,
                [(colour, list(run.metrics[name].items())) for _, colour, run, name in part],
                from_zero="per_second" in chart or chart in ("memory", "data_wait"),
            )
            yield tag("figure", tag("figcaption", title, tag("span", *keys, class_="keys")), drawn)


def _samples(run: RunRecord, several: bool) -> Iterator[Markup]:
    for suffix in (".png", ".txt"):
        found = [sample for sample in run.samples if sample[1].suffix == suffix]
        count = min(_MOST_SAMPLES // (2 if several else 1), len(found))
        places = sorted({round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)})
        figures = [
            tag("figure", tag("figcaption", f"step {step:,}"), _sample(step, path))
            for step, path in (found[place] for place in places)
        ]
        yield tag("div", *figures, class_="" if several else "grid") if figures else Markup()
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
    checkpoints = [(f"{step:,}", path, monitor, number(score)) for step, path, monitor, score in run.checkpoints]
    parts = {
        "Not known": tag("ul", *(tag("li", text) for text in run.missing)) if run.missing else "",
        "Warnings": _table([(text, f"{count} times") for text, count in run.warnings.items()]),
        "Checkpoints": _table(checkpoints, ["step", "file", "metric", "score"]),
        "Environment": _table([*run.environment.items()]),
        "Config": tag("pre", run.config_text[:_LONGEST]) if run.config_text else "",
        "Log": tag("pre", run.log[-_LONGEST:]) if run.log else "",
    }
    return joined(*(tag("details", tag("summary", name), part) for name, part in parts.items() if part))

"""The memory over one planned step as a picture: what lies where, by kind, the peak and what the device has."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_efficient.files.atomic_file import replacing
from lit_efficient.mechanisms.trials.memory import format_bytes

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

_INK, _GREY, _LIMIT = "#1f2933", "#6b7785", "#c2410c"
# What stays from step to step is cool and dark, what comes and goes is warm.
_COLOURS = {
    "weights": "#1d4e89",
    "adapters": "#2f7fc1",
    "states": "#4aa3a2",
    "averages": "#7cc6b8",
    "buffers": "#a9b8c6",
    "gradients": "#7d5ba6",
    "activations": "#f2a541",
    "logits": "#e4572e",
    "communication": "#c9a0dc",
    "other": "#8d99a6",
    "margin": "#dfe3e8",
}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_APART = 0.14  # of the axis: the least distance of two names below it


def memory_figure(plan: "Plan", limit: int | None = None, title: str = "Memory over one step") -> Any:
    """The figure, of matplotlib; the bytes that the device has are drawn where they are not far above the peak."""
    from matplotlib.figure import Figure

    moments = plan.timeline
    sums = [sum(moment.kinds.values()) for moment in moments]
    unit = next((name for name, size in _UNITS.items() if plan.peak >= size / 2), "KiB")
    scale = _UNITS[unit]
    figure = Figure(figsize=(9.0, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    places = list(range(len(moments) + 1))  # a moment lasts from its place to the next one
    floor = [0.0] * len(places)
    known = [kind for kind in _COLOURS if any(moment.kinds.get(kind) for moment in moments)]
    for kind in [*known, *sorted({kind for moment in moments for kind in moment.kinds} - _COLOURS.keys())]:
        sizes = [moment.kinds.get(kind, 0) / scale for moment in moments]
        top = [below + size for below, size in zip(floor, [*sizes, *sizes[-1:]])]
        colour, label = _COLOURS.get(kind, _GREY), f"{kind}, up to {format_bytes(max(sizes, default=0) * scale)}"
        axes.fill_between(places, floor, top, step="post", color=colour, linewidth=0, label=label)
        floor = top
    peak = max(range(len(sums)), key=sums.__getitem__, default=0)
    height = plan.peak / scale
    axes.plot([peak + 0.5], [height], "v", color=_INK, markersize=7, clip_on=False, zorder=4)
    name = moments[peak].name if moments else ""
    right = peak > 0.6 * len(moments)
    axes.annotate(
        f"peak {format_bytes(plan.peak)}{f', {name}' if name else ''}",
        (peak + 0.5, height),
        xytext=(-9 if right else 9, 7),
        textcoords="offset points",
        ha="right" if right else "left",
        color=_INK,
        fontsize=9.5,
        fontweight="bold",
    )
    ceiling = height * 1.18
    if limit is not None and limit <= 4 * plan.peak:
        ceiling = max(ceiling, limit / scale * 1.12)
        axes.axhline(limit / scale, color=_LIMIT, linestyle=(0, (5, 3)), linewidth=1.4, zorder=3)
        axes.text(0.0, limit / scale, f" the device has {format_bytes(limit)}", color=_LIMIT, va="bottom", fontsize=9.5)
    named = _named([moment.name for moment in moments])
    axes.set_xticks([place for place, _ in named], [text for _, text in named], fontsize=8.5)
    axes.set_xlim(0, max(1, len(moments)))
    axes.set_ylim(0, ceiling or 1)
    axes.set_ylabel(unit, color=_INK)
    axes.set_title(title, color=_INK, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, labelcolor=_INK, fontsize=9)
    return figure


def _named(names: list[str]) -> list[tuple[float, str]]:
    """The middle of the longest run of moments of each name, of those that have room below the axis."""
    runs: dict[str, tuple[int, float]] = {}
    end = 0
    for name, run in itertools.groupby(names):
        length = len(list(run))
        end += length
        runs[name] = max(runs.get(name, (0, 0.0)), (length, end - length / 2))
    kept: list[tuple[float, str]] = []
    for name, (_, place) in sorted(runs.items(), key=lambda item: -item[1][0]):
        if all(abs(place - other) >= _APART * len(names) for other, _ in kept):
            kept.append((place, name))
    return kept


def draw_memory(path: Path, plan: "Plan", limit: int | None = None, title: str = "Memory over one step") -> None:
    """Write :func:`memory_figure` as a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with replacing(path) as file:
        FigureCanvasAgg(memory_figure(plan, limit, title)).print_png(file)

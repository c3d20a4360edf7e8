"""Picture of the memory over one planned step by kind, with its peak and the memory of the device.

Needs matplotlib (the extra ``plots``). The table of `plan` shows the same peak without it.
"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from lit_efficient.declaration import format_bytes
from lit_efficient.files.atomic_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lit_efficient.evidence.planning.plan import Plan

_INK = "#1f2933"
_GREY = "#6b7785"
_LIMIT = "#c2410c"
# Kinds that stay between steps are cool and dark, temporary kinds are warm.
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
_APART = 0.14  # least distance of two names below the axis, as a share of the axis


def memory_figure(plan: "Plan", limit: int | None = None, title: str = "Memory over one step") -> "Figure":
    """Return a figure of matplotlib. The limit is drawn unless it is far above the peak."""
    from matplotlib.figure import Figure

    moments = plan.timeline
    unit = next((name for name, size in _UNITS.items() if plan.peak >= size / 2), "KiB")
    scale = _UNITS[unit]
    figure = Figure(figsize=(9.0, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    kinds = [kind for kind in _COLOURS if any(moment.kinds.get(kind) for moment in moments)]
    sizes = [[moment.kinds.get(kind, 0) / scale for moment in moments] for kind in kinds]
    if sizes:
        axes.stackplot(
            range(len(moments) + 1),
            [[*row, row[-1]] for row in sizes],  # a moment lasts from its place to the next one
            step="post",
            linewidth=0,
            colors=[_COLOURS[kind] for kind in kinds],
            labels=[f"{kind}, up to {format_bytes(max(row) * scale)}" for kind, row in zip(kinds, sizes)],
        )
        figure.legend(loc="outside right upper", reverse=True, frameon=False, labelcolor=_INK, fontsize=9)
    _mark_peak(axes, plan, scale)
    # The label of the peak needs room above it.
    ceiling = plan.peak / scale * 1.18
    if limit is not None and limit <= 4 * plan.peak:
        ceiling = max(ceiling, limit / scale * 1.12)
        axes.axhline(limit / scale, color=_LIMIT, linestyle=(0, (5, 3)), linewidth=1.4, zorder=3)
        axes.text(0.0, limit / scale, f" the device has {format_bytes(limit)}", color=_LIMIT, va="bottom", fontsize=9.5)
    names = _names([moment.name for moment in moments])
    axes.set_xticks(list(names.values()), list(names), fontsize=8.5)
    axes.set_xlim(0, max(1, len(moments)))
    axes.set_ylim(0, ceiling or 1)
    axes.set_ylabel(unit, color=_INK)
    axes.set_title(title, color=_INK, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def _mark_peak(axes: "Axes", plan: "Plan", scale: int) -> None:
    """Draw a mark and a label at the peak. The label is on the side with more room."""
    moments = plan.timeline
    place = 0
    text = f"peak {format_bytes(plan.peak)}"
    if moments:
        place = max(range(len(moments)), key=lambda i: moments[i].bytes)
        text += f", {moments[place].name}"
    height = plan.peak / scale
    axes.plot([place + 0.5], [height], "v", color=_INK, markersize=7, clip_on=False, zorder=4)
    distance = 9
    side = "left"
    if place > 0.6 * len(moments):
        distance = -9
        side = "right"
    axes.annotate(
        text,
        (place + 0.5, height),
        xytext=(distance, 7),
        textcoords="offset points",
        ha=side,
        color=_INK,
        fontsize=9.5,
        fontweight="bold",
    )


def _names(names: list[str]) -> dict[str, float]:
    """Return the middle of the longest run of moments of each name, for the names that have room below the axis."""
    runs: dict[str, tuple[int, float]] = {}
    end = 0
    for name, run in itertools.groupby(names):
        length = len(list(run))
        end += length
        runs[name] = max(runs.get(name, (0, 0.0)), (length, end - length / 2))
    kept: dict[str, float] = {}
    # Long runs are named first, since short ones may have no room.
    for name, (_, place) in sorted(runs.items(), key=lambda item: -item[1][0]):
        if all(abs(place - other) >= _APART * len(names) for other in kept.values()):
            kept[name] = place
    return kept


def draw_memory(path: Path, plan: "Plan", limit: int | None = None, title: str = "Memory over one step") -> None:
    """Write :func:`memory_figure` as a PNG file atomically."""
    with replacing(path) as file:
        memory_figure(plan, limit, title).savefig(file, format="png")

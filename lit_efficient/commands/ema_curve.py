"""Validation loss against the width of the average: the numbers as a table and a file, and their picture.

One point a width, and a line for the weights without an average, which a width has to beat.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing

_INK, _GREY, _LINE, _BEST = "#1f2933", "#6b7785", "#2f6db3", "#c2410c"


@dataclass(frozen=True)
class WidthCurve:
    """What validation says about each width.

    Args:
        metrics: For each width everything that its validation logged, by name.
        raw: The same for the weights without an average.
        metric: The name that is compared; lower is better.
        step: Optimizer step at which the averages end.
    """

    metrics: Mapping[float, Mapping[str, float]]
    raw: Mapping[str, float]
    metric: str
    step: int

    def __post_init__(self) -> None:
        if self.metric not in self.raw:
            raise ConfigurationError(
                f"ema-sweep: --metric must be one that the validation logs ({', '.join(sorted(self.raw)) or 'none'}), "
                f"got {self.metric!r}"
            )

    @property
    def losses(self) -> dict[float, float]:
        """The metric by width, narrowest first."""
        return {width: self.metrics[width][self.metric] for width in sorted(self.metrics)}

    @property
    def best(self) -> float:
        """The width with the lowest loss."""
        return min(self.losses, key=self.losses.__getitem__)

    def table(self) -> str:
        """The numbers, a line a width, and which one is best; then where to look next."""
        rows = [(f"{width:g}", loss) for width, loss in self.losses.items()] + [("none", self.raw[self.metric])]
        lowest = min(loss for _, loss in rows)
        lines = [f"{'sigma_rel':>9}  {self.metric:>12}"]
        lines += [f"{name:>9}  {loss:12.6g}{'  best' if loss == lowest else ''}" for name, loss in rows]
        if self.losses[self.best] >= self.raw[self.metric]:
            lines.append("No width is better than the weights without an average: try narrower ones.")
        elif len(self.losses) > 1 and self.best in (min(self.losses), max(self.losses)):
            side = "narrower" if self.best == min(self.losses) else "wider"
            lines.append(f"The best width is the last on its side: {side} ones may be better still.")
        return "\n".join(lines)

    def write_csv(self, path: Path) -> None:
        """All metrics, a row a width; the row without an average has an empty width."""
        text = io.StringIO(newline="")
        names = sorted(self.raw)
        writer = csv.writer(text)
        writer.writerow(["sigma_rel", "step", *names])
        for width in sorted(self.metrics):
            writer.writerow([repr(width), self.step, *(repr(self.metrics[width][name]) for name in names)])
        writer.writerow(["", self.step, *(repr(self.raw[name]) for name in names)])
        with replacing(path) as file:
            file.write(text.getvalue().encode())

    def draw(self, path: Path, tracked: Collection[float] = ()) -> None:
        """Write the picture as a PNG.

        Args:
            path: Where to.
            tracked: Widths that the run tracked; the others were built from them.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        widths, losses = list(self.losses), list(self.losses.values())
        figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(widths, losses, color=_LINE, linewidth=1.8, zorder=2)
        for kind, face in (("tracked in the run", _LINE), ("built afterwards", "white")):
            chosen = [w for w in widths if (w in tracked) == (face == _LINE)]
            heights = [self.losses[w] for w in chosen]
            if chosen:
                axes.plot(chosen, heights, "o", color=_LINE, markerfacecolor=face, markersize=6.5, label=kind, zorder=3)
        raw = self.raw[self.metric]
        axes.axhline(raw, color=_GREY, linestyle=(0, (5, 3)), linewidth=1.2, label=f"no average: {raw:#.4g}", zorder=1)
        best = self.losses[self.best]
        axes.plot([self.best], [best], "o", markersize=14, markerfacecolor="none", color=_BEST, markeredgewidth=1.8)
        label = f"best width, {self.best:g}: {best:#.4g}"
        axes.plot([], [], "o", markersize=9, markerfacecolor="none", color=_BEST, markeredgewidth=1.8, label=label)
        axes.set_xlabel("width of the average, sigma_rel (share of the run)", color=_INK)
        axes.set_ylabel(self.metric, color=_INK)
        axes.set_title(f"Validation after {self.step:,} steps, by width of the average", color=_INK, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(colors=_INK)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.margins(x=0.06, y=0.14)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)


def loss_among(names: Sequence[str]) -> str:
    """The validation loss among logged metrics: ``val/loss`` or ``val_loss``, or the only one that is called a loss.

    Raises:
        ConfigurationError: If none or several could be meant.
    """
    for name in ("val/loss", "val_loss"):
        if name in names:
            return name
    losses = [name for name in names if "loss" in name]
    if len(losses) == 1:
        return losses[0]
    raise ConfigurationError(
        "ema-sweep: which metric is the validation loss? Add --metric NAME; "
        f"logged: {', '.join(sorted(names)) or 'none'}"
    )

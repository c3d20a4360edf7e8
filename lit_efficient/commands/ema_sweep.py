"""``python -m lit_efficient ema-sweep DIR --sigma_rel 0.05 0.10 0.15``: build averages of any width after a run.

The run must have used PowerEMA. With ``--config`` (the one in the run's folder) and ``--checkpoint``, each average and
the weights without an average are validated. A table, ``ema-sweep.csv`` and ``ema-sweep.png`` show the loss by width.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import ConfigurationError, check_installed, refusal
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.checkpoints import Checkpoint, local_file, weights_alone, write
from lit_efficient.files.hidden_names import hidden_beside
from lit_efficient.mechanisms.averages.snapshots import find_snapshots, synthesize
from lit_efficient.mechanisms.restore import without_heads
from lit_efficient.surgery import memory_of

# Colours of the chart.
_INK = "#1f2933"
_GREY = "#6b7785"
_LINE = "#2f6db3"
_BEST = "#c2410c"


def run(argv: list[str]) -> int:
    """Run ``ema-sweep``."""
    parser = argparse.ArgumentParser(
        "python -m lit_efficient ema-sweep",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="With --config the options of `python -m lit_efficient validate` are accepted: --data.batch_size 8, "
        "--trainer.limit_val_batches 20, --allow-import PACKAGE.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the snapshots that PowerEMA wrote")
    parser.add_argument(
        "--sigma_rel", type=float, nargs="+", required=True, help="widths of the averages, as shares of the run"
    )
    parser.add_argument("--step", type=int, help="last step of the averages (default: the last snapshot's)")
    parser.add_argument("--checkpoint", help="checkpoint of the run, for weights that are not averaged")
    parser.add_argument("--output", help="output folder (default: the folder of the snapshots)")
    parser.add_argument("-c", "--config", action="append", help="config of the run: validate and plot each width")
    parser.add_argument("--metric", help="metric to plot, lower is better (default: the validation loss)")
    options, others = parser.parse_known_args(argv)
    if others and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(others)} (options of a validation need --config)")
    if options.config and not options.checkpoint:
        raise ConfigurationError(
            "ema-sweep: --config needs --checkpoint, a checkpoint of the run, for the weights that are not averaged"
        )
    if options.config:
        check_installed("ema-sweep -c", "matplotlib")
    snapshots = find_snapshots(options.folder)
    output = local_file(options.output or options.folder)
    output.mkdir(parents=True, exist_ok=True)
    with hidden_beside(output / "scratch") as scratch:
        scratch.mkdir()
        if options.config:  # before the work, because errors in the config appear within a second
            from lit_efficient.cli.evaluate import Validator

            validate = Validator(options.config, [f"--trainer.default_root_dir={scratch}", *others])
        base = None
        if options.checkpoint:
            base = read_checkpoint(options.checkpoint)
        files = _build(options, base, output)
        if options.config and base is not None:
            step = options.step or snapshots[-1].step
            if base.get("global_step", step) != step:
                print(f"Note: {options.checkpoint} is of step {base['global_step']}, the averages end at step {step}.")
            # Without the states of callbacks, because an EMA would validate its average instead of these weights.
            raw = scratch / "raw.ckpt"
            write(raw, weights_alone(base, base["state_dict"], "raw"))
            without = validate(raw)
            metric = options.metric or loss_among(list(without))
            curve = WidthCurve({width: validate(path) for width, path in files.items()}, without, metric, step)
            curve.write_csv(output / "ema-sweep.csv")
            curve.draw(output / "ema-sweep.png", {snapshot.sigma_rel for snapshot in snapshots})
            print(f"{curve.table()}\nWrote {output / 'ema-sweep.csv'} and {output / 'ema-sweep.png'}")
    return 0


def _build(options: argparse.Namespace, base: Checkpoint | None, output: Path) -> dict[float, Path]:
    """Write one file per width and return their paths."""
    files: dict[float, Path] = {}
    for sigma_rel, average in zip(options.sigma_rel, synthesize(options.folder, options.sigma_rel, options.step)):
        path = output / f"ema-sigma_rel={sigma_rel:g}"
        if base is None:
            path = path.with_name(f"{path.name}.safetensors")
            write(path, {"state_dict": average})
        else:
            path = path.with_name(f"{path.name}.ckpt")
            write(path, _completed(base, average, options.checkpoint))
        files[sigma_rel] = path
        print(f"Wrote {path}")
    return files


def _completed(base: Checkpoint, average: dict[str, Tensor], path: str) -> Checkpoint:
    """Return the checkpoint ``base`` with averaged weights, also for tied names."""
    state = base["state_dict"]
    average = without_heads(average, base)
    unknown = sorted(average.keys() - state.keys())
    if unknown:
        raise ConfigurationError(f"{path} has no {unknown[0]!r}, but the snapshots have: is it from another run?")
    # Snapshots hold a tied weight under one of its names; tensors of the checkpoint that share memory are tied.
    averages = {memory_of(state[name]): tensor for name, tensor in average.items()}
    completed = {}
    for name, tensor in state.items():
        averaged = averages.get(memory_of(tensor))
        completed[name] = tensor if averaged is None else averaged.to(tensor.dtype)
    return weights_alone(base, completed, "ema")


@dataclass(frozen=True)
class WidthCurve:
    """Validation metrics by width of the average."""

    metrics: Mapping[float, Mapping[str, float]]  # by width, then by name
    raw: Mapping[str, float]  # the same for the weights without an average
    metric: str  # name of the compared metric; lower is better
    step: int  # optimizer step at which the averages end

    def __post_init__(self) -> None:
        if self.metric not in self.raw:
            allowed = f"one that the validation logs ({', '.join(sorted(self.raw)) or 'none'})"
            raise refusal("ema-sweep", "--metric", allowed, self.metric)

    @property
    def losses(self) -> dict[float, float]:
        """Return the compared metric by width, narrowest first."""
        return {width: self.metrics[width][self.metric] for width in sorted(self.metrics)}

    @property
    def best(self) -> float:
        """The width with the lowest loss."""
        return min(self.losses, key=self.losses.__getitem__)

    def table(self) -> str:
        """Return the metric by width as a table, with the best width and advice for further widths."""
        rows = {f"{width:g}": loss for width, loss in self.losses.items()} | {"none": self.raw[self.metric]}
        lines = [f"{'sigma_rel':>9}  {self.metric:>12}"]
        for name, loss in rows.items():
            mark = "  best" if loss == min(rows.values()) else ""
            lines.append(f"{name:>9}  {loss:12.6g}{mark}")
        if self.losses[self.best] >= self.raw[self.metric]:
            lines.append("No width is better than the weights without an average: try narrower widths.")
        elif len(self.losses) > 1 and self.best in (min(self.losses), max(self.losses)):
            side = "narrower" if self.best == min(self.losses) else "wider"
            lines.append(f"The best width is at the edge of the range: {side} widths may be better.")
        return "\n".join(lines)

    def write_csv(self, path: Path) -> None:
        """Write all metrics, one row per width; the row of the weights without an average has an empty width."""
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
        """Write the chart as a PNG. Widths that are not ``tracked`` by the run were built afterwards."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        widths = list(self.losses)
        losses = list(self.losses.values())
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


def loss_among(names: Sequence[str], who: str = "ema-sweep") -> str:
    """Return the validation loss among logged metrics: ``val/loss``, ``val_loss`` or the only name with "loss".

    Raises:
        ConfigurationError: If there is none, or several could be meant.
    """
    for name in ("val/loss", "val_loss"):
        if name in names:
            return name
    losses = [name for name in names if "loss" in name]
    if len(losses) == 1:
        return losses[0]
    raise ConfigurationError(
        f"{who}: which metric is the validation loss? Add --metric NAME; logged: {', '.join(sorted(names)) or 'none'}"
    )

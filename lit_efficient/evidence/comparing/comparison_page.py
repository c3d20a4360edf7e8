"""Report of ``compare``: a page of HTML that needs nothing else, Markdown and CSV files, and all of them in W&B."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger, WandbLogger
from markupsafe import Markup

from lit_efficient.evidence.comparing.comparison import Comparison, VariantResult
from lit_efficient.evidence.comparing.comparison_charts import bars, scatter, shown_kinds
from lit_efficient.evidence.comparing.comparison_tables import (
    csv_text,
    facts,
    left_out,
    markdown,
    notes,
    numbers,
    tables,
)
from lit_efficient.evidence.reporting.line_chart import COLOURS, Line, Unit, line_figure
from lit_efficient.evidence.reporting.pages import rendered
from lit_efficient.files.atomic_file import replacing

NAME = "comparison"  # file name without its suffix


def html(comparison: Comparison) -> str:
    """Return the whole page."""
    done = comparison.done
    # A point needs both coordinates. An unknown one is NaN or 0.
    placed = [each for each in done if 0 < each.time.value < math.inf and 0 < each.peak_ratio < math.inf]
    drawing: Markup | str = ""
    best: list[int] = []
    labels: dict[int, str] = {}
    if placed:
        drawing, best, labels = scatter(placed)
    seen = [each for each in done if each.peak]
    kinds = shown_kinds(seen)
    bar_chart: Markup | str = ""
    if seen:
        bar_chart = bars(seen, kinds, Unit([each.peak for each in seen]))
    names = [each.name for each in done]
    return rendered(
        "comparison.html",
        mark="",
        title=f"Comparison of {len(comparison.variants)} variants",
        facts=facts(comparison),
        command=comparison.command,
        failed=[(each.name, each.failed) for each in comparison.variants if each.failed],
        scatter=drawing,
        frontier=[placed[i].name for i in best],
        numbered=[f"{i + 1}: {placed[i].name}" for i, label in labels.items() if label == str(i + 1)],
        hidden=[each.name for i, each in enumerate(placed) if i not in labels],
        absent=[each.name for each in done if each not in placed],
        bars=bar_chart,
        kinds=kinds,
        planned=any(each.planned is not None for each in seen),
        curves=list(_curves(done, comparison.metric)),
        tables=[
            (title, ["variant", *columns], list(zip(names, *columns.values(), strict=True)))
            for title, columns in tables(comparison).items()
        ],
        notes=notes(comparison),
        left_out=left_out(comparison),
    )


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the page, the Markdown and the CSV file atomically, and return their paths."""
    texts = {"html": html(comparison), "md": markdown(comparison), "csv": csv_text(comparison)}
    files = []
    for suffix, text in texts.items():
        path = folder / f"{NAME}.{suffix}"
        with replacing(path) as file:
            file.write(text.encode())
        files.append(path)
    return files


def log_to_wandb(comparison: Comparison, files: Sequence[Path], loggers: Sequence[Logger]) -> None:
    """Log a comparison with each W&B logger: a table, summary values, the page as a panel, the files as an artifact.

    Args:
        comparison: The comparison.
        files: The files of :func:`write_report`.
        loggers: The loggers of a trainer. Other loggers than W&B's are ignored.
    """
    rows = numbers(comparison)
    figures = {}
    for row in rows:
        for head, value in row.items():
            if not row["failed"] and isinstance(value, int | float) and math.isfinite(value):
                figures[f"{NAME}/{row['name']}/{head}"] = value
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            run = logger.experiment
            # Columns hold numbers and missing values, which are mixed types for W&B.
            table = wandb.Table(list(rows[0]), [list(row.values()) for row in rows], allow_mixed_types=True)
            shown: dict[str, object] = {f"{NAME}/table": table}
            artifact = wandb.Artifact(f"{NAME}-{run.id}", NAME)
            for file in files:
                artifact.add_file(str(file))
                if file.suffix == ".html":
                    shown[f"{NAME}/page"] = wandb.Html(str(file), inject=False)
            run.log(shown)
            run.summary.update(figures)
            run.log_artifact(artifact)


def _curves(done: Sequence[VariantResult], metric: str) -> Iterator[Markup]:
    # A curve without finite times has no place on the axis of seconds.
    drawn = [each for each in done if each.curve and all(math.isfinite(seconds) for _, seconds, _ in each.curve)]
    if not drawn:
        return
    # A chart has as many lines as there are colours. The baseline is in each of them.
    baseline, *others = drawn
    for start in range(0, max(len(others), 1), COLOURS - 1):
        part = [baseline, *others[start : start + COLOURS - 1]]
        for along, column in (("step", 0), ("second", 1)):
            lines = [
                Line(i, each.name, [(point[column], point[2]) for point in each.curve]) for i, each in enumerate(part)
            ]
            yield line_figure(metric, f"by {along}", lines, along=along)

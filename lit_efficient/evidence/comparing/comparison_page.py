"""The report of ``compare``: a page of HTML that needs nothing else, Markdown, CSV, and all of it in W&B."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

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
from lit_efficient.evidence.reporting.line_chart import COLOURS, Unit, line_figure
from lit_efficient.evidence.reporting.markup import Markup, document, grid, joined, table, tag
from lit_efficient.files.atomic_file import replacing

NAME = "comparison"  # of the files, but for what follows the dot


def html(comparison: Comparison) -> str:
    """The whole page."""
    done = [each for each in comparison.variants if not each.failed]
    title = f"Comparison of {len(comparison.variants)} variants"
    rows = (tag("div", tag("dt", name), tag("dd", text)) for name, text in facts(comparison).items())
    command = tag("pre", comparison.command, class_="command") if comparison.command else ""
    others = left_out(comparison)
    sections = {
        "": tag("section", tag("dl", *rows), command, class_="card"),
        "What failed": table([(each.name, each.failed) for each in comparison.variants if each.failed]),
        "Memory and speed": grid("runs tops", *_memory(done)),
        "Loss": grid("runs", *_curves(done, comparison.metric)),
        "All numbers": joined(*_tables(comparison), *(tag("p", note) for note in notes(comparison))),
        "More": tag("details", tag("summary", "Left out"), table([*others.items()])) if others else "",
    }
    heads = (joined(tag("h2", name) if name else "", content) for name, content in sections.items() if content)
    return "<!doctype html>" + document(title, tag("h1", title), *heads)


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the page, the Markdown and the CSV, each whole or not at all."""
    texts = {"html": html(comparison), "md": markdown(comparison), "csv": csv_text(comparison)}
    for suffix, text in texts.items():
        with replacing(folder / f"{NAME}.{suffix}") as file:
            file.write(text.encode())
    return [folder / f"{NAME}.{suffix}" for suffix in texts]


def log_to_wandb(comparison: Comparison, files: Sequence[Path], loggers: Sequence[object]) -> None:
    """Log the numbers as a table and in the summary, the page as a panel, and the files of :func:`write_report` as an
    artifact, with those of a trainer's loggers that are W&B's.
    """
    from lightning.pytorch.loggers import WandbLogger

    rows = numbers(comparison)
    figures = {
        f"{NAME}/{row['name']}/{head}": value
        for row in rows
        for head, value in row.items()
        if not row["failed"] and isinstance(value, int | float) and math.isfinite(value)
    }
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            content = wandb.Table([*rows[0]], [[*row.values()] for row in rows], allow_mixed_types=True)
            pages = {f"{NAME}/page": wandb.Html(str(file), inject=False) for file in files if file.suffix == ".html"}
            artifact = wandb.Artifact(f"{NAME}-{logger.experiment.id}", NAME)
            for file in files:
                artifact.add_file(str(file))
            logger.experiment.log({f"{NAME}/table": content, **pages})
            logger.experiment.summary.update(figures)
            logger.experiment.log_artifact(artifact)


def _memory(done: Sequence[VariantResult]) -> Iterator[Markup]:
    placed = [each for each in done if 0 < each.time.value < math.inf and 0 < each.peak_ratio < math.inf]
    if placed:
        drawn, best, labels = scatter(placed)
        numbered = ", ".join(f"{i + 1}: {placed[i].name}" for i, label in labels.items() if label == str(i + 1))
        hidden = ", ".join(each.name for i, each in enumerate(placed) if i not in labels)
        absent = ", ".join(each.name for each in done if each not in placed)
        yield tag(
            "figure",
            tag("figcaption", "Peak memory against step time"),
            drawn,
            tag("p", "Lower left is better: less memory, less time. On the line, the frontier, is what no other ",
                f"variant beats in both; the fastest first: {', '.join(placed[i].name for i in best)}. ",
                "Bars are 95 % intervals of the time."),
            tag("p", numbered) if numbered else "",
            tag("p", "Too close to others for a label: ", hidden) if hidden else "",
            tag("p", "Not here, as time or memory is not known: ", absent) if absent else "",
        )  # fmt: skip
    if seen := [each for each in done if each.peak]:
        kinds = shown_kinds([each.kinds for each in seen])
        keys = [tag("span", kind, class_=f"key line{colour}") for colour, kind in enumerate(kinds)]
        keys += [tag("span", "planned", class_="key tick")] * any(each.planned is not None for each in seen)
        drawn = bars(seen, kinds, Unit([each.peak for each in seen]))
        yield tag("figure", tag("figcaption", "Memory at the peak by kind", grid("keys", *keys)), drawn)


def _curves(done: Sequence[VariantResult], metric: str) -> Iterator[Markup]:
    drawn = [each for each in done if each.curve and all(math.isfinite(seconds) for _, seconds, _ in each.curve)]
    for start in range(1, max(len(drawn), 2), COLOURS - 1):  # the baseline is in each of them
        part = [*enumerate(drawn[:1] + drawn[start : start + COLOURS - 1])]
        for along, column in (("step", 0), ("second", 1)):
            lines = [(i, each.name, [(point[column], point[2]) for point in each.curve]) for i, each in part]
            if lines:
                yield line_figure(metric, f"by {along}", lines, along=along)


def _tables(comparison: Comparison) -> Iterator[Markup]:
    names = [each.name for each in comparison.variants if not each.failed]
    for title, columns in tables(comparison).items():
        cells = [[_soft(cell) for cell in column] for column in columns.values()]
        yield tag("h3", title)
        yield table(list(zip(names, *cells, strict=True)), ["variant", *columns])


def _soft(cell: str) -> str:
    return tag("span", cell, class_="soft") if cell.endswith("evidence") else cell

"""The tables and pictures of docs/measuring.md: what `compare` has found, of both tasks and of a ResNet, as records.

    python -m benchmarks.compared language_model=FOLDER latent_diffusion=FOLDER resnet=FOLDER

A folder is one that `compare --folder` has written. The rows go into figures.json, and a picture beside the page.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import figures

DOCS = figures.ROOT / "docs"
COLUMNS = ["", "Time of a step", "Peak memory, MiB", "Planned, MiB", "Checkpoint, MiB", "Loss at equal steps"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Of each variant the name, and what was measured."""
    with (folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
        read = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in read if not row["failed"]]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def records(name: str, folder: Path) -> list[dict[str, Any]]:
    """A record for each variant."""
    command = re.search(r"^python .* compare .*$", (folder / "comparison.md").read_text("utf-8"), re.MULTILINE)
    assert command is not None
    now, found = figures.here(), []
    for number, row in enumerate(rows_of(folder)):
        sizes = {key: round(row[key] / 2**20, 2) for key in ("peak", "planned") if row[key]}
        sizes["checkpoint"] = round(row["checkpoint_bytes"] / 2**20, 2)
        measured = {key: round(row[key], 3) for key in ("time", "time_low", "time_high")} | sizes
        loss = {key: round(row[key], 3) for key in ("loss", "loss_low", "loss_high")}
        cells = ["1", "0"] if not number else [_said("time", row["time_p"]), _said("loss", row["loss_p"])]
        found.append(
            {
                "id": f"compared/{name}/{row['name']}",
                "table": f"compared_{name}",
                "command": re.sub(r" --folder \S+", "", command[0]).replace("--allow_import", "--allow-import"),
                "unit": "ratio of CPU time, MiB, difference of the validation loss; with 95 % intervals",
                "figures": measured | loss,
                "cells": [f"`{row['name']}`", cells[0], "{peak}", "{planned}", "{checkpoint}", cells[1]],
                "date": now["date"],
                "threads": 1,
                "environment": "compared",
            }
        )
    return found


def _said(key: str, p: Any) -> str:
    lack = "" if isinstance(p, float) and p <= 0.05 else ", no evidence" if isinstance(p, float) else ", not tested"
    return "{" + key + "} [{" + key + "_low}, {" + key + "_high}]" + lack


def draw(name: str, folder: Path) -> None:
    """Peak memory against the time of a step, with intervals; lower left is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, row in enumerate(rows_of(folder)):
        memory, low, high = row["peak_ratio"], row["time"] - row["time_low"], row["time_high"] - row["time"]
        axes.errorbar(row["time"], memory, xerr=[[low], [high]], fmt="o", capsize=3)
        axes.annotate(
            row["name"],
            (row["time"], memory),
            xytext=(5, -13 if number % 2 else 5),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_xlabel("CPU time of a step, baseline = 1")
    axes.set_ylabel("peak memory, baseline = 1")
    axes.margins(0.15, 0.2)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / f"compared_{name}.png", dpi=110, metadata={"Software": ""})


def main() -> int:
    source = json.loads(figures.FILE.read_text("utf-8"))
    for given in sys.argv[1:]:
        name, _, folder = given.partition("=")
        draw(name, Path(folder))
        others = [one for one in source["records"] if one.get("table") != f"compared_{name}"]
        source["records"] = [*others, *records(name, Path(folder))]
        source["tables"][f"compared_{name}"] = COLUMNS
    now = figures.here()
    source["environments"]["compared"] = {key: now[key] for key in ("versions", "machine")}
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Turn results of the command `compare` into the tables and charts of docs/measuring.md.

    python -m benchmarks.compared language_model=FOLDER latent_diffusion=FOLDER resnet=FOLDER

FOLDER is an output folder of `compare --folder`. The rows go into records/figures.json. The chart of each comparison
goes into docs/compared_NAME.png.
"""

from __future__ import annotations

import argparse
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
    """Return the rows of comparison.csv without failed variants. Numbers become floats."""
    with (folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
        read = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in read if not row["failed"]]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def records(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return one record of figures.json for each variant."""
    command = re.search(r"^python .* compare .*$", (folder / "comparison.md").read_text("utf-8"), re.MULTILINE)
    assert command is not None
    now = figures.here()
    found = []
    for number, row in enumerate(rows_of(folder)):
        sizes = {key: round(row[key] / 2**20, 2) for key in ("peak", "planned") if row[key]}
        sizes["checkpoint"] = round(row["checkpoint_bytes"] / 2**20, 2)
        measured = {key: round(row[key], 3) for key in ("time", "time_low", "time_high")} | sizes
        loss = {key: round(row[key], 3) for key in ("loss", "loss_low", "loss_high")}
        if number == 0:  # The first variant is the baseline: its ratio is 1 and its difference 0.
            cells = ["1", "0"]
        else:
            cells = [_with_evidence("time", row["time_p"]), _with_evidence("loss", row["loss_p"])]
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


def _with_evidence(key: str, p: float | str) -> str:
    """Return the template of a cell: value, interval, and a note where the p value is above 0.05 or missing."""
    if not isinstance(p, float):
        note = ", not tested"
    elif p > 0.05:
        note = ", no evidence"
    else:
        note = ""
    return "{" + key + "} [{" + key + "_low}, {" + key + "_high}]" + note


def draw(name: str, folder: Path) -> None:
    """Draw peak memory against the time of a step, with intervals. Lower left is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, row in enumerate(rows_of(folder)):
        memory = row["peak_ratio"]
        low = row["time"] - row["time_low"]
        high = row["time_high"] - row["time"]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="+", metavar="NAME=FOLDER", help="output folder of `compare --folder`")
    comparisons = parser.parse_args().comparisons
    source = json.loads(figures.FILE.read_text("utf-8"))
    for given in comparisons:
        name, separator, folder = given.partition("=")
        if not separator:
            parser.error(f"{given}: expected NAME=FOLDER, for example language_model=runs/comparison")
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

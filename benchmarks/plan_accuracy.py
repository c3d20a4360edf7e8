"""Measure the error of the memory that `plan` predicts, on about a hundred small trainings.

    python -m benchmarks.plan_accuracy                    measure all cells that the folder lacks; can be interrupted
    python -m benchmarks.plan_accuracy --only Llama LoRA  measure again the cells with one of these words in their names
    python -m benchmarks.plan_accuracy --drawn 15 --seed 7    measure random cells: other sizes and pairs of techniques
    python -m benchmarks.plan_accuracy --show             print the table of the measured cells
    python -m benchmarks.plan_accuracy --record           write benchmarks/records (.csv and figures.json); keep the
                                                          recorded cells that the folder lacks
    python -m benchmarks.plan_accuracy --device cuda      measure on a GPU by torch.cuda.max_memory_allocated

A cell is a small training. It runs in a forked process, which plans, trains and counts. The error is
(planned - measured) / measured of the most bytes alive at a time, from the third step on. A training that cannot run on
a CPU is planned for a GPU there, and is not measured. The count agrees with the allocator's records to 0.01 MiB, except
for scratch space within kernels of convolutions. The recorded table is from three days: 95 cells and a first draw of
2026-11-23, 24 cells of later techniques of 2026-11-27, and a draw by another seed, after the code was frozen, of
2026-11-28.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from benchmarks.plan_cells import MODELS, Cell, CellFit, cells, drawn
from benchmarks.plan_truth import measure

FOLDER = Path("runs/plan_accuracy")
TABLE = Path(__file__).parent / "records" / "plan_accuracy.csv"
KINDS = ("weights", "gradients", "states")  # between steps; weights with buffers
TITLES = ("set", "model", "size", "technique", "batch", "precision", "planned", "measured", "error %")
Row = dict[str, Any]


def planned(cell: Cell, device: str) -> Row:
    """Return the plan of a cell. The machine need not have the planned device."""
    begin = time.monotonic()
    found = le.plan(CellFit(cell, MODELS[cell.model].rows(cell.size), device), device=device)
    kinds = dict(found.resident)
    kinds["weights"] += kinds.get("adapters", 0) + kinds.get("buffers", 0)  # as they are counted
    seconds = round(time.monotonic() - begin, 2)
    told = {"planned": found.peak, "by_plan": kinds, "notes": list(found.notes), "plan_seconds": seconds}
    return told | ({"bound": found.at_most} if found.at_most else {})


def row(cell: Cell, device: str) -> Row:
    """Plan a cell, then measure it."""
    refused = next((how.cuda_only for how in cell.settings if how.cuda_only), "") if device == "cpu" else ""
    if refused:
        return {**planned(cell, "cuda"), "refused": f"a CPU refuses it: {refused}; planned for a GPU"}
    result = planned(cell, device)
    source = CellFit(cell, MODELS[cell.model].rows(cell.size), device)
    found = measure(source, all(how.counted for how in cell.settings))
    return {**result, "measured": found.pop("peak"), "by_count": found}


def _work(cell: Cell, device: str, folder: Path, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    log = (folder / "log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.chdir(folder)
    begin = time.monotonic()
    print(f"--- {cell.name}", flush=True)
    try:
        result = row(cell, device)
    except le.LitEfficientError as error:
        result = {"refused": str(error).splitlines()[0]}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    pipe.send({**result, "seconds": round(time.monotonic() - begin, 1)})


def run(wanted: Iterable[Cell], device: str, folder: Path, minutes: float) -> Iterator[Row]:
    """Yield the row of each cell when it ends, one after another."""
    if device == "cpu":  # what all cells import is imported once
        for model in ("Llama", "UNet"):
            planned(Cell(model, ("LoRA",) if model == "Llama" else (), 2, "32-true", MODELS[model].small), device)
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + 60 * minutes
    for cell in wanted:
        if time.monotonic() > end:
            return
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(cell, device, folder, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = {"failed": "the process was killed"}
        process.join()
        size = f"{cell.size.width} x {cell.size.depth} x {cell.size.length}"
        technique = " + ".join(cell.techniques) or "plain"
        described = {"model": cell.model, "size": size, "technique": technique, "batch": cell.batch}
        yield {"name": cell.name, **described, "precision": cell.precision, **result}


def error(result: Row) -> float | None:
    """Return the error in percent. A negative value means that too little was planned."""
    known = "measured" in result and not result.get("bound")
    return 100 * (result["planned"] / result["measured"] - 1) if known else None


def summary(results: Iterable[Row]) -> dict[str, float | int]:
    """Return the median and maximum of the absolute errors, and the largest underestimate."""
    errors = [e for e in map(error, results) if e is not None]
    if not errors:
        return {"cells": 0}
    sizes = sorted(map(abs, errors))
    return {
        "cells": len(errors),
        "median": round(statistics.median(sizes), 2),
        "worst": round(sizes[-1], 2),
        "under": round(max(0.0, -min(errors)), 2),
    }


def said(result: Row) -> str:
    """Return a row as readable text."""
    mib = [f"{result[key] / 2**20:9.2f}" if key in result else f"{'-':>9}" for key in ("planned", "measured")]
    told = error(result)
    bound = f"at most: {result['bound']}" if "bound" in result else ""
    shown = f"{told:+7.2f} %" if told is not None else bound or result.get("refused") or result.get("failed")
    line = f"{result['name']:58} {' '.join(mib)} MiB  {shown}"
    if "by_count" not in result:
        return line
    pairs = (
        f"{kind} {result['by_plan'].get(kind, 0) / 2**20:.2f}/{result['by_count'][kind] / 2**20:.2f}"
        for kind in KINDS
        if kind in result["by_count"]
    )
    return f"{line}  {', '.join(pairs)}"


def write(sets: dict[str, list[Row]], path: Path) -> None:
    """Write the table of all rows: bytes, errors in percent, planned and counted bytes by kind."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        kinds = [f"{kind} {side}" for kind in KINDS for side in ("planned", "measured")]
        writer.writerow([*TITLES, *kinds, "note"])
        for name, results in sets.items():
            for result in results:
                told = error(result)
                values = [result.get(key, "") for key in TITLES[1:-1]]
                pairs = [result.get(side, {}).get(kind, "") for kind in KINDS for side in ("by_plan", "by_count")]
                bound = f"at most: {result['bound']}" if "bound" in result else ""
                note = bound or result.get("refused") or result.get("failed") or ""
                writer.writerow([name, *values, "" if told is None else f"{told:.2f}", *pairs, note])


def record(sets: dict[str, list[Row]]) -> None:
    """Write the summaries into figures.json and replace the earlier ones."""
    now = figures.here()
    source = json.loads(figures.FILE.read_text("utf-8"))
    source["environments"]["plan_accuracy"] = {key: now[key] for key in ("versions", "machine")}
    found = {
        f"{name.partition(',')[0]}_{key}": value
        for name, results in sets.items()
        for key, value in summary(results).items()
    }
    said = (
        "median {fixed_median} %, worst {fixed_worst} %, at most {fixed_under} % too little, over {fixed_cells} cells"
    )
    if "drawn_cells" in found:
        said += "; {drawn_cells} drawn ones: median {drawn_median} %, worst {drawn_worst} %, {drawn_under} % too little"
    one = {
        "id": "plan_accuracy",
        "table": "benchmarks",
        "command": "python -m benchmarks.plan_accuracy",
        "unit": "percent of the counted peak of live bytes",
        "figures": found,
        "cells": ["`{command}`", "`plan` beside counted allocations, on small trainings", said],
        "date": now["date"],
        "threads": 1,
        "environment": "plan_accuracy",
    }
    source["records"] = [*(other for other in source["records"] if other["id"] != one["id"]), one]
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def with_known(sets: dict[str, list[Row]], path: Path) -> dict[str, list[Row]]:
    """Return the recorded rows whose cells were not measured again, followed by ``rows``."""
    new = {(name, *(str(row[key]) for key in TITLES[1:6])) for name, rows in sets.items() for row in rows}
    found: dict[str, list[Row]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if (line["set"], *(line[key] for key in TITLES[1:6])) in new:
                continue
            row: Row = {key: line[key] for key in TITLES[1:6]}
            row |= {key: int(line[key]) for key in TITLES[6:8] if line[key]}
            for side, title in (("by_plan", "planned"), ("by_count", "measured")):
                sizes = {kind: int(line[f"{kind} {title}"]) for kind in KINDS if line[f"{kind} {title}"]}
                row |= {side: sizes} if sizes else {}
            note = "bound" if line["note"].startswith("at most: ") else "refused"
            told = {note: line["note"].removeprefix("at most: ")} if line["note"] else {}
            found.setdefault(line["set"], []).append(row | told)
    return {name: [*found.get(name, []), *sets.get(name, [])] for name in {**found, **sets}}


def load(path: Path) -> dict[str, Row]:
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, metavar="WORD")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="measure N random cells instead of the fixed ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=30.0, help="start no cell after this many minutes")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    use_one_thread()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA must not start before the forks
    file = folder / (f"drawn-{options.seed}.jsonl" if options.drawn else "rows.jsonl")
    results = load(file)
    if not (options.show or options.record):
        wanted: Iterable[Cell] = drawn(options.seed) if options.drawn else cells()
        if options.only:
            wanted = (cell for cell in wanted if any(word in cell.name for word in options.only))
        else:
            wanted = (cell for cell in wanted if "failed" in results.get(cell.name, {"failed": "not yet"}))
        for result in run(wanted, options.device, folder, options.minutes):
            results[result["name"]] = result
            file.write_text("".join(json.dumps(r) + "\n" for r in results.values()), "utf-8")
            print(said(result), flush=True)
            if options.drawn and sum("measured" in r for r in results.values()) >= options.drawn:
                break
    sets = {"fixed": list(load(folder / "rows.jsonl").values())}
    sets |= {
        path.stem.replace("-", ", seed "): list(load(path).values()) for path in sorted(folder.glob("drawn-*.jsonl"))
    }
    for name, rows in sets.items():
        if options.show:
            print("\n".join(said(result) for result in rows))
        print(f"{name}: {summary(rows)}")
    print("RESULT " + json.dumps({name: summary(rows) for name, rows in sets.items()}))
    if options.record:
        sets = with_known(sets, TABLE)
        write(sets, TABLE)
        record(sets)
    return 0


if __name__ == "__main__":
    sys.exit(main())

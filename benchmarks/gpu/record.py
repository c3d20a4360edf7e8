"""Copy the results of a run on a GPU into benchmarks/records/figures.json, the source of the documents.

    python -m benchmarks.gpu.record runs/gpu --date 2026-11-28
    python -m benchmarks.figures --write

Measured rungs replace their earlier rows. Rungs that did not run keep them.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu.drive import FINAL
from benchmarks.gpu.pieces import ROOT
from benchmarks.ladder_gpu import RUNGS

COLUMNS = ["Rung", "Peak", "Tokens a second", "Of the bfloat16 peak", "torch", "Expected, and why"]
FIGURES = ROOT / "benchmarks" / "records" / "figures.json"


def ladder(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each measured rung."""
    found = []
    by_name = {row["name"]: row for row in rows}
    for row in (by_name[f"ladder/{name}"] for name in RUNGS if f"ladder/{name}" in by_name):
        figures = {**(row.get("result") or {}), "torch": row["on"][2]}
        name = row["name"].removeprefix("ladder/")
        if row["status"] != "ok":
            continue
        share = "{share_of_peak:.3f}" if "share_of_peak" in figures else "-"
        if "by" in figures:
            how = "were run" if "longest was run" in figures else "by two lengths"
            by = f"{figures['longest by two lengths']:,} tokens {how}"
            cells = [f"{name}: {by}", "{peak_gib:.2f} GiB at {length:,}", "{tokens_a_second:,} there", "-"]
        elif "does not fit" in figures:
            cells = [name, "does not fit", "-", "-"]
        else:
            cells = [
                name + ("" if figures["length"] == 4096 else ", {length:,} tokens"),
                "{peak_gib:.2f} GiB",
                "{tokens_a_second:,}",
                share,
            ]
        command = f"python -m benchmarks.ladder_gpu '{name}'"
        found.append({"id": f"gpu/{name}", "table": "gpu", "command": command, "unit": "GiB; tokens a second",
                      "figures": figures, "cells": [*cells, "{torch}", RUNGS[name].expected]})  # fmt: skip
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record with the number of passed smoke tests and passed test functions."""
    passes = [one for row in rows if row["group"] == "smoke" for one in (row.get("result") or {}).values()]
    tests = [row for row in rows if row["group"] in ("tests", "paging") and row["status"] in ("ok", "failed")]
    figures = {
        "passes": len(passes),
        "held": sum("error" not in one for one in passes),
        "waiting": sum(one.get("waits_a_step", 0) > 1 for one in passes),
        "tests": len(tests),
        "tests_held": sum(row["status"] == "ok" for row in tests),
    }
    text = (
        "{held} of {passes} passes of the smoke test held, {waiting} of them waited for the device more than once a "
        "step; {tests_held} of {tests} test functions held (`{command}`)"
    )
    return {"id": "gpu/smoke", "command": "benchmarks/gpu.sh", "unit": "passes", "figures": figures, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", required=True)
    options = parser.parse_args()
    rows = {}
    for line in (options.folder / "results.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["status"] in FINAL or row["name"] not in rows:
            rows[row["name"]] = row
    said = re.search(r"^Device: (.+?)\. Versions: (.+)\.$", (options.folder / "report.md").read_text("utf-8"), re.M)
    if said is None:
        parser.error(f"{options.folder}/report.md names no device")
    versions = dict(pair.split(" ") for pair in said[2].split(", "))
    rows = {name: row for name, row in rows.items() if row["on"][2] == versions["torch"]}
    source = json.loads(FIGURES.read_text("utf-8"))
    environment = f"gpu {options.date}"
    source["environments"][environment] = {"versions": versions, "machine": said[1]}
    source["tables"]["gpu"] = COLUMNS
    new = [*ladder(list(rows.values())), summary(list(rows.values()))]
    new = [{**one, "date": options.date, "threads": 16, "environment": environment} for one in new]
    known = {one["id"] for one in new}
    source["records"] = [one for one in source["records"] if one["id"] not in known] + new
    FIGURES.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()

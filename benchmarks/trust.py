"""Fault injection: run cases that damage, interrupt or misuse the package, and record how often it behaves correctly.

    python -m benchmarks.trust                       run all cases without a result; can be interrupted
    python -m benchmarks.trust --sample 0.05         run a twentieth of the cases
    python -m benchmarks.trust --only kill damaged   run the pieces with one of these words in their names
    python -m benchmarks.trust --minutes 20          run for at most 20 minutes
    python -m benchmarks.trust --again               run the failed cases again
    python -m benchmarks.trust --show                print the results so far
    python -m benchmarks.trust --write               write benchmarks/records/trust.json and TRUST.md

A piece is a group of cases with one expectation. Each case runs in an empty folder, usually in a process forked from
one that has imported everything. Results are stored in runs/trust, with a file for each piece and a line for each case.
``--write`` stores the passed cases in trust.json, so that a later run on any machine skips them. Failed cases are
recorded, too. Cases that read files take a tenth of the time if TMPDIR is in memory.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clock import use_one_thread
from benchmarks.trust_rows import Piece, pieces
from tests import processes

FOLDER = Path("runs/trust")
TALLIES = Path(__file__).parent / "records" / "trust.json"
TABLE = TALLIES.with_name("TRUST.md")
_TEMPORARY = re.compile(r"/(?:tmp|dev/shm)/[\w-]+/")
SHOWN = 5  # of the cases that went wrong, for each piece
ROWS = {
    1: "Killed at any instant",
    2: "Resumed from every step",
    3: "Damaged files",
    4: "Signals",
    5: "NaN, Inf and spikes",
    6: "Full disks, dead workers, two runs in one folder",
    7: "Mistakes in configs",
    8: "Changes before a resume",
    9: "Hostile inputs",
    10: "Secrets",
    11: "Supply chain",
    12: "Load",
    13: "Determinism",
    14: "Properties",
    15: "Faults put into the package",
}
HEAD = """# Trust

What was done to the package on purpose, how often, and how often it held. Each figure is as found: what went wrong and
is not mended is listed below the table. `held` of `tried` cases; peers did the same where it says so. What was
mended is tried again, so `held` is of the code as it is; the commits of a piece's last tries stand in `trust.json`.
The commands: `python -m benchmarks.trust --only NAME` for a piece, `python -m benchmarks.trust` for all.
"""


def sample(piece: Piece, share: float, seed: int = 0) -> list[str]:
    """Return a share of a piece's cases, at least one, the same for the same seed."""
    names = list(piece.cases())
    count = max(1, round(share * len(names)))
    return names if count >= len(names) else random.Random(f"{piece.name} {seed}").sample(names, count)


def attempt(piece: Piece, case: str, folder: Path | None = None) -> str:
    """Run a case in a new empty folder (below ``folder``, if given). Return a description of the failure, or ''."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
        os.chdir(own)
        try:
            return piece.trial(case, Path(own))
        except Exception as error:  # An error of the undisturbed reference run is a finding, too.
            return f"it does not run at all: {type(error).__name__}: {error}"[:300]
        finally:
            os.chdir(before)


def _groups(cases: Iterable[str]) -> dict[str, list[str]]:
    """Group cases by their first word. New cases in one group then keep the results of the other groups."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        groups.setdefault(re.split(r"[^A-Za-z_/]", case, maxsplit=1)[0], []).append(case)
    return groups


def _digest(cases: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(cases).encode()).hexdigest()[:6]


def packed(cases: Iterable[str], held: Mapping[str, bool]) -> dict[str, str]:
    """Encode the results of each group: digest of its cases, then counts of passed (+), failed (-), untried (.) cases.

    >>> packed(["flip-0", "flip-1", "cut-0"], {"flip-0": True})
    {'flip': '888c94 1+1.'}
    """
    found = {}
    for word, names in _groups(cases).items():
        marks = ["-+"[held[name]] if name in held else "." for name in names]
        if {*marks} != {"."}:
            runs = (f"{len([*same])}{mark}" for mark, same in itertools.groupby(marks))
            found[word] = f"{_digest(names)} {''.join(runs)}"
    return found


def unpacked(cases: Iterable[str], kept: Mapping[str, str]) -> dict[str, bool]:
    """Decode the results of :func:`packed`, for the groups whose cases are unchanged."""
    found = {}
    for word, names in _groups(cases).items():
        digest, _, runs = kept.get(word, "").partition(" ")
        if digest == _digest(names):
            marks = "".join(mark * int(count) for count, mark in re.findall(r"(\d+)([-+.])", runs))
            found |= {name: mark == "+" for name, mark in zip(names, marks, strict=True) if mark != "."}
    return found


def kept() -> dict[str, dict[str, Any]]:
    """Return the rows of trust.json by piece."""
    return {row["piece"]: row for row in json.loads(TALLIES.read_text() if TALLIES.exists() else "[]")}


def new_results(piece: Piece) -> dict[str, dict[str, Any]]:
    """Return the last result of each case in runs/trust, in the order of the first results."""
    file = FOLDER / f"{piece.name}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    cases = {*piece.cases()}
    return {line["case"]: line for line in lines if line["case"] in cases}


def results(piece: Piece, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the last result of each case: from ``row`` of trust.json, overridden by runs/trust."""
    before = {}
    for case, held in unpacked(piece.cases(), row.get("results", {})).items():
        texts = [line.removeprefix(f"{case}: ") for line in row["wrong"] if line.startswith(f"{case}: ")]
        fault = "" if held else (texts or ["it went wrong"])[0]
        before[case] = {"case": case, "fault": fault, "commit": " ".join(row["commits"])}
    return before | new_results(piece)


def run(chosen: Sequence[Piece], share: float, end: float, again: bool) -> int:
    """Run the cases without a result. Return the number of failed cases."""
    wrong = 0
    before = kept()
    for piece in chosen:
        known = results(piece, before.get(piece.name, {}))
        left = [c for c, row in known.items() if row["fault"]] if again else []
        left = left if again else [case for case in sample(piece, share) if case not in known]
        begin = time.monotonic()
        faults = 0
        for count, case in enumerate(left):
            if time.monotonic() > end:
                print(f"the time is over; {piece.name}: {len(left) - count} cases are left", flush=True)
                return wrong
            start = time.monotonic()
            fault = attempt(piece, case)
            row = {"case": case, "fault": fault, "seconds": round(time.monotonic() - start, 2), "commit": _commit()}
            with (FOLDER / f"{piece.name}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if fault:
                faults += 1
                print(f"{piece.name}: {case}: {fault}", flush=True)
        if left:
            print(f"{piece.name}: {len(left)} tried, {faults} wrong, {time.monotonic() - begin:.0f} s", flush=True)
        wrong += faults
    return wrong


def tallies(all_pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return the row of trust.json for each piece with results."""
    from benchmarks.figures import here

    found = []
    before = kept()
    for piece in all_pieces:
        earlier = before.get(piece.name, {})
        rows = results(piece, earlier)
        cases = [*piece.cases()]
        if not rows:
            continue
        faults = [f"{case}: {_TEMPORARY.sub('', row['fault'])}" for case, row in rows.items() if row["fault"]]
        found.append(
            {
                "row": piece.row,
                "piece": piece.name,
                "subject": piece.subject,
                "sentence": piece.sentence,
                "cases": len(cases),
                "tried": len(rows),
                "held": len(rows) - len(faults),
                "wrong": faults[:SHOWN],
                "results": packed(cases, {case: not row["fault"] for case, row in rows.items()}),
                "commits": sorted({commit for row in rows.values() for commit in row["commit"].split()}),
                "where": here() if new_results(piece) else earlier["where"],
            }
        )
    return found


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the text of TRUST.md."""
    lines = [HEAD, "| row | tried on | what is done, and must hold | tried | held | command |", "| --- " * 6 + "|"]
    for row in rows:
        of = f"{row['tried']:,}" + (f" of {row['cases']:,}" if row["tried"] < row["cases"] else "")
        title = f"{row['row']}. {ROWS[row['row']]}"
        command = f"`--only {row['piece']}`"
        lines.append(f"| {title} | {row['subject']} | {row['sentence']} | {of} | **{row['held']:,}** | {command} |")
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        lines += ["", "## What went wrong", ""]
        for row in wrong:
            missing = row["tried"] - row["held"] - len(row["wrong"])
            more = [f"and {missing} more"] if missing else []
            lines += [f"- `{row['piece']}` ({row['subject']}): {'; '.join([*row['wrong'], *more])}"]
    lines += ["", "## Where", ""]
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(_place(row["where"]), []).append(f"`{row['piece']}`")
    lines += [f"- {place}: {', '.join(names)}" for place, names in places.items()]
    return "\n".join(lines) + "\n"


def _place(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['date']}, {where['machine']}, {versions}"


@functools.cache
def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield f"{row['row']:>2}  {row['piece']:<32} {row['subject']:<14} {row['held']:>5} of {row['tried']:>5} held"
        yield from (f"      {fault}" for fault in row["wrong"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--rows", nargs="+", type=int, default=())
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    everything = pieces()
    chosen = [piece for piece in everything if not given.only or any(word in piece.name for word in given.only)]
    chosen = [piece for piece in chosen if not given.rows or piece.row in given.rows]
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.show:
        print("\n".join(_table(tallies(chosen))))
    elif given.write:
        rows = kept() | {row["piece"]: row for row in tallies(chosen)}
        order = {piece.name: number for number, piece in enumerate(everything)}
        current = sorted((row for name, row in rows.items() if name in order), key=lambda row: order[row["piece"]])
        TALLIES.write_text(json.dumps(current, indent=1) + "\n")
        TABLE.write_text(page(current))
    else:
        use_one_thread()
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        processes.prepare(heavy=False)
        os.environ.setdefault("LIT_EFFICIENT_CACHE", str(FOLDER.resolve() / "cache"))
        try:
            return int(run(chosen, given.sample, time.monotonic() + 60 * given.minutes, given.again) > 0)
        finally:
            processes.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

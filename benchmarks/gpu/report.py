"""Markdown report of the rows: environment, results, and pieces that did not run."""

from __future__ import annotations

import collections
from typing import Any

from benchmarks.gpu.pieces import GROUPS, Piece

Row = dict[str, Any]


def report(header: dict[str, Any], plan: list[Piece], rows: dict[str, Row]) -> str:
    """Return the report."""
    counts = collections.Counter(rows.get(piece.name, {"status": "not run yet"})["status"] for piece in plan)
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    refused = f" Wheels that could not be installed: {', '.join(header['refused'])}." if header["refused"] else ""
    parts = [
        "# On the device",
        f"    {header['command']}",
        f"Device: {header['device']}. Versions: {versions}.",
        f"Missing packages: {', '.join(header['missing']) or 'none'}.{refused}",
        "Pieces: " + ", ".join(f"{count} {status}" for status, count in counts.most_common()) + ".",
    ]
    for key, group in GROUPS.items():
        chosen = [piece for piece in plan if piece.group == key]
        if chosen:
            parts += [f"## {group.title}", group.about, TABLES.get(key, plain)(chosen, rows), *details(chosen, rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(titles: list[str], lines: list[list[object]]) -> str:
    cells = [titles, ["---"] * len(titles), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in cells)


def state(row: Row) -> str:
    """Return the status of a piece, with its reason if there is one."""
    return ": ".join(filter(None, [row.get("status", "not run yet"), row.get("why", "")]))


def plain(chosen: list[Piece], rows: dict[str, Row]) -> str:
    found = [(piece, rows.get(piece.name, {})) for piece in chosen]
    lines = [[piece.name, state(row), row.get("seconds", ""), piece.expected] for piece, row in found]
    return table(["piece", "ended", "s", "expected, and why"], lines)


def smoke(chosen: list[Piece], rows: dict[str, Row]) -> str:
    """Return a line for each case and precision, then the lines of code that wait for the device, over all cases."""
    lines: list[list[object]] = []
    places: collections.Counter[str] = collections.Counter()
    met: dict[str, set[str]] = collections.defaultdict(set)
    for piece in chosen:
        row = rows.get(piece.name, {})
        name = piece.name.removeprefix("smoke/")
        for precision, found in row.get("result", {}).items():
            places.update(found.get("places", {}))
            for place in found.get("places", {}):
                met[place].add(name)
            loss = " to ".join(map(str, found.get("loss", [])))
            ended = [found.get("error", "ok"), loss, found.get("peak_mib", ""), found.get("waits_a_step", "")]
            lines.append([name, precision, *ended])
        if not row.get("result") or row.get("status") not in ("ok", "failed"):
            lines.append([name, "", state(row), "", "", ""])
    text = table(["case", "precision", "ended", "loss", "peak MiB", "waits a step"], lines)
    if places:
        waits: list[list[object]] = [
            [place, count, ", ".join(sorted(met[place]))[:120]] for place, count in places.most_common()
        ]
        text += "\n\n" + table(["place that waits", "times", "in"], waits)
    return text


def ladder(chosen: list[Piece], rows: dict[str, Row]) -> str:
    lines: list[list[object]] = []
    for piece in chosen:
        row = rows.get(piece.name, {})
        found = row.get("result", {})
        ended = "does not fit" if "does not fit" in found else state(row)
        if "longest by two lengths" in found and "longest was run" not in found:
            ended += f"; {found['longest by two lengths']:,} tokens would fit, by two lengths"
        cells = [found.get(key, "") for key in ("length", "peak_gib", "tokens_a_second", "share_of_peak")]
        lines.append([piece.name.removeprefix("ladder/"), ended, *cells, piece.expected])
    return table(["rung", "ended", "length", "peak GiB", "tokens/s", "share of peak", "expected, and why"], lines)


def details(chosen: list[Piece], rows: dict[str, Row]) -> list[str]:
    """Return the command of each piece with the kept output."""
    found = [(piece, rows.get(piece.name, {}).get("output", "")) for piece in chosen]
    return [f"`{piece.command}`\n\n```text\n{output.replace('```', '')}\n```" for piece, output in found if output]


TABLES = {"smoke": smoke, "ladder": ladder}

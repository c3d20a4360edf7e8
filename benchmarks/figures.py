"""Write each measured figure into the documents from its record in records/figures.json.

    python -m benchmarks.figures            list the files that differ from figures.json
    python -m benchmarks.figures --write    update these files
    python -m benchmarks.figures --here     print the date, versions and machine for a new record

A record holds figures, their unit, the command that measured them, the date, the number of threads, and the
environment (versions and machine). A document includes the figures in three ways:

- ``<!-- figures: TABLE -->...<!-- /figures -->`` in Markdown encloses a table of all records that name this table. A
  record names one ``table`` with its ``cells``, and further tables with their cells in ``also``;
- ``<!-- figure: ID -->...<!-- /figure -->`` encloses the ``text`` of one record;
- ``stands_in`` of a record maps other files (configs, docstrings) to a sentence with figures. Line breaks in the file
  do not matter.

The command also generates lit_efficient/measured.json, which holds the measurements shown by ``techniques NAME``.
"""

import argparse
import datetime
import json
import os
import platform
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "records" / "figures.json"
CARDS = ROOT / "lit_efficient" / "measured.json"
SOURCE = json.loads(FILE.read_text("utf-8"))
RECORDS = {record["id"]: record for record in SOURCE["records"]}
NAMED = ("torch", "lightning", "transformers", "peft", "diffusers", "bitsandbytes", "torchao", "numpy")
_BLOCK = re.compile(r"(<!-- (figures?): (\S+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)
# A number with a unit, as in prose. Whole gigabytes are excluded because they give the size of a device.
_FIGURE = re.compile(
    r"(?<![\d.,])(?!\d+ GB)\d[\d.,]* ?(?:ms|s|min|(?:micro|CPU-)?seconds?|[KMGT]i?B|dB|%|times)(?!\w)|\d(?:\.\d+)?e-\d+"
)


def filled(record: dict, template: str) -> str:
    """Return the template with the record's figures filled in. Raise ``KeyError`` for a field the record lacks."""
    return template.format(command=record["command"], **record["figures"])


def table(name: str, folder: Path) -> str:
    """Return a table in Markdown. Links relative to the repository's root become relative to ``folder``."""
    columns = SOURCE["tables"][name]
    rows = []
    for record in RECORDS.values():
        cells = record["cells"] if record.get("table") == name else record.get("also", {}).get(name)
        if cells:
            rows.append([filled(record, cell) for cell in cells])
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    to_root = os.path.relpath(ROOT, folder)
    prefix = "" if to_root == "." else f"{Path(to_root).as_posix()}/"
    text = re.sub(r"\]\((?!\w+:)([^)]+)\)", lambda link: f"]({prefix}{link[1]})", "\n".join(lines))
    own = re.escape(f"{prefix}{folder.relative_to(ROOT).as_posix()}/")
    return re.sub(rf"\]\({own}", "](", text)


def generated(path: Path, text: str) -> str:
    """Return the text of a Markdown file with the content between markers generated from the records."""

    def block(match: re.Match[str]) -> str:
        opening, kind, name, _, closing = match.groups()
        if kind == "figures":
            return f"{opening}\n{table(name, path.parent)}\n{closing}"
        return f"{opening}{filled(RECORDS[name], RECORDS[name]['text'])}{closing}"

    return _BLOCK.sub(block, text)


def _pattern(record: dict, template: str) -> re.Pattern[str]:
    """Return a pattern that matches a ``stands_in`` sentence with any figures, line breaks and comment signs."""
    parts = []
    for literal, field, _, _ in string.Formatter().parse(template):
        parts.append(r"[\s#]+".join(map(re.escape, re.split(r"\s+", literal))))
        if field is not None:
            parts.append(r"([\d.,]*\d)")
    return re.compile("".join(parts))


def restated(record: dict, template: str, text: str) -> str | None:
    """Return ``text`` with the figures of one sentence updated, or ``None`` if ``text`` lacks the sentence."""
    match = _pattern(record, template).search(text)
    if match is None:
        return None
    fields = [(field, form) for _, field, form, _ in string.Formatter().parse(template) if field is not None]
    for number, (field, form) in reversed(list(enumerate(fields, start=1))):
        start, end = match.span(number)
        text = text[:start] + format(record["figures"][field], form or "") + text[end:]
    return text


def markdown_files() -> list[Path]:
    """Return the Markdown files that may hold figures: README, docs (no build output) and those in configs."""
    found = [path for folder in ("docs", "configs") for path in sorted((ROOT / folder).rglob("*.md"))]
    return [ROOT / "README.md", *(path for path in found if not path.relative_to(ROOT).parts[1].startswith(("_", ".")))]


def differences() -> Iterator[tuple[Path, str]]:
    """Yield each file that differs from the records, with the text it should have.

    Raises:
        ValueError: If a file lacks its ``stands_in`` sentence.
    """
    texts = {path: generated(path, path.read_text("utf-8")) for path in markdown_files()}
    for record in RECORDS.values():
        for name, template in record.get("stands_in", {}).items():
            path = ROOT / name
            new = restated(record, template, texts.get(path) or path.read_text("utf-8"))
            if new is None:
                raise ValueError(f"{name} lacks the sentence of {record['id']}: {template}")
            texts[path] = new
    texts[CARDS] = json.dumps(of_cards(), indent=1, ensure_ascii=False) + "\n"
    yield from ((path, text) for path, text in texts.items() if text != path.read_text("utf-8"))


def networks_of(name: str) -> str:
    """Return the networks of a row of the table of techniques. A name with Qwen3-MoE has it in the place of the GPT."""
    if "Qwen3-MoE" in name:
        return "Qwen3-MoE / DiT / ResNet"
    return "GPT / DiT / ResNet"


def of_cards() -> dict[str, str]:
    """Return the measurements of each technique as "WHAT: RESULT (COMMAND)"."""
    found: dict[str, list[str]] = {}
    for record in RECORDS.values():
        if "technique" not in record or "cells" not in record:
            continue
        if "reason" in record["figures"]:
            text = f"on the small GPT, DiT and ResNet: {record['figures']['reason'].replace('`', '')}"
        elif record["table"] == "techniques":
            columns = SOURCE["tables"]["techniques"][1:]
            results = [filled(record, cell) for cell in record["cells"][1:]]
            pairs = (f"{column.lower()} {result}" for column, result in zip(columns, results))
            text = f"with it beside without it, on a small {networks_of(record['cells'][0])}: "
            text += f"{'; '.join(pairs)} ({record['command']})"
        else:
            command, what, result = (filled(record, cell).replace("`", "") for cell in record["cells"])
            text = f"{what}: {result} ({command})"
        found.setdefault(record["technique"], []).append(text)
    return {name: ". ".join(texts) for name, texts in sorted(found.items())}


def unrecorded(text: str) -> list[str]:
    """Return the figures with a unit in Markdown outside markers, code and generated tables.

    Enclose numbers that are not measurements (a setting, a figure of a paper) in ``<!-- given -->`` and
    ``<!-- /given -->`` to exclude them.
    """
    text = re.sub(
        r"<!-- (given|techniques|hardware|image_recipes).*?<!-- /\1 -->", "", _BLOCK.sub("", text), flags=re.DOTALL
    )
    return _FIGURE.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))


def here() -> dict[str, object]:
    """Return the date, versions, machine and number of threads of a measurement made now."""
    versions = {}
    for name in NAMED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": f"{os.cpu_count()} CPUs, {models[0] if models else platform.processor() or platform.machine()}",
        "threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
    }


def record_table(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the records of a table into figures.json. A row whose figures are the same keeps its date."""
    source = json.loads(FILE.read_text("utf-8"))
    now = here()
    source["environments"][name] = {key: now[key] for key in ("versions", "machine")}
    source["tables"][name] = list(columns)
    before = source["records"]
    known = {one["id"]: one for one in before}
    new = [known[one["id"]] if known.get(one["id"], {}).get("figures") == one["figures"] else one for one in rows]
    others = [one for one in before if one.get("table") != name]
    place = next((i for i, one in enumerate(before) if one.get("table") == name), len(before))
    source["records"] = others[:place] + new + others[place:]
    FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("To update the documents, run: python -m benchmarks.figures --write")


def arguments_of(description: str | None) -> argparse.Namespace:
    """Return the arguments ``show`` and ``record`` of a benchmark that keeps its finished runs in a file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the table of the finished runs")
    parser.add_argument("--record", action="store_true", help="write the table into figures.json")
    return parser.parse_args()


def finished_runs(file: Path) -> list[dict[str, Any]]:
    """Return the runs in a file with one in each line, whose folder is created."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def record_ratios(name: str, command: str, cells: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    """Write a table of ratios into figures.json. The first two cells of a row are its name."""
    rows = []
    for row in cells:
        *words, ratio, p, seeds = row
        rows.append(
            {
                "id": "/".join((name, *words[:2])),
                "table": name,
                "command": command,
                "unit": "ratio of losses, geometric mean over seeds, 95 % interval",
                "figures": {"ratio": ratio, "p": p},
                "cells": [*words, "{ratio}", "{p}", seeds],
                "date": here()["date"],
                "threads": 1,
                "environment": name,
            }
        )
    record_table(name, columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the files that differ")
    parser.add_argument("--here", action="store_true", help="print the date, versions and machine for a new record")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(here(), indent=1))
        return 0
    found = list(differences())
    for path, text in found:
        print(f"{path.relative_to(ROOT)} {'is written' if options.write else 'differs from records/figures.json'}")
        if options.write:
            path.write_text(text, encoding="utf-8")
    return 1 if found and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())

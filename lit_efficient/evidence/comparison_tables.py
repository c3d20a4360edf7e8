"""What ``compare`` measured, as text: tables for a terminal and for Markdown, raw numbers for CSV.

Ratios and differences stand with their 95 % interval, and "no evidence" in the place of those with p > 0.05.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from lit_efficient.evidence.comparison import Comparison, Estimate, VariantResult
from lit_efficient.evidence.line_chart import number
from lit_efficient.evidence.markup import plain
from lit_efficient.evidence.text_table import room_of, text_lines, text_row, text_table

NONE = "-"
_MORE_DIGITS = 3  # to tell a bound from what no difference is
Columns = Mapping[str, Sequence[str]]


def said(estimate: Estimate | None, no_difference: float) -> str:
    """An estimate for people, in as many digits as its interval warrants.

    Args:
        estimate: What was measured.
        no_difference: What it is between equals: 1 for a ratio, 0 for a difference.

    Example:
        >>> said(Estimate(0.9312, 0.91, 0.953, 0.01, 5), 1).replace("\N{NO-BREAK SPACE}", " ")
        '0.931 [0.910, 0.953]'
    """
    if estimate is None or not math.isfinite(estimate.value):
        return NONE
    shown = [estimate.value, estimate.low, estimate.high]
    half = (estimate.high - estimate.low) / 2
    if not 0 < half < math.inf:
        interval, value = "", number(estimate.value)
    else:
        power = math.floor(math.log10(half))
        step = 10.0 ** (power - (half / 10.0**power < 3.55))
        for _ in range(_MORE_DIGITS):
            if all(bound == no_difference or round(bound / step) != round(no_difference / step) for bound in shown[1:]):
                break
            step /= 10
        value, low, high = (number(each, step, max(map(abs, shown))) for each in shown)
        interval = f" [{low},\N{NO-BREAK SPACE}{high}]"
    if not tested(estimate):
        return f"{value}{interval}, not tested"
    return f"{'no evidence' if lacks_evidence(estimate) else value}{interval}"


def tested(estimate: Estimate | None) -> bool:
    """Whether there is a p."""
    return estimate is not None and estimate.p is not None and not math.isnan(estimate.p)


def lacks_evidence(estimate: Estimate | None) -> bool:
    """Whether p > 0.05."""
    return estimate is not None and estimate.p is not None and estimate.p > 0.05


def tables(comparison: Comparison) -> dict[str, Columns]:
    """Tables by their titles, each of columns by their heads, with a cell for each variant that did not fail."""
    done = [each for each in comparison.variants if not each.failed]
    memory, files = Unit([each.peak for each in done]), Unit([each.checkpoint_bytes for each in done])
    units = sorted({one_line(each.unit) for each in done})
    own = " {}" if len(units) > 1 else ""
    speed = {
        "step time": [_beside(each, each.time, 1, comparison) for each in done],
        f"{' or '.join(units)} a second": [number(each.rate.value) + own.format(one_line(each.unit)) for each in done],
        f"peak memory, {memory.name}": [f"{memory.of(each.peak)} ({_short(each.peak_ratio)})" for each in done],
        f"planned, {memory.name}": [_planned(each, memory) for each in done],
    }
    loss = {
        "at equal steps": [_beside(each, each.loss, 0, comparison) for each in done],
        "at equal time": [_beside(each, each.loss_at_time, 0, comparison) for each in done],
        "steps to equal": [_beside(each, each.steps_to_loss, 1, comparison) for each in done],
        "time to equal": [_beside(each, each.time_to_loss, 1, comparison) for each in done],
        "forgetting": [_beside(each, each.forgetting, 0, comparison) for each in done],
    }
    sizes = {
        "trained parameters": [number(each.trainable) for each in done],
        f"checkpoint, {files.name}": [files.of(each.checkpoint_bytes) for each in done],
    } | {
        one_line(kind): [memory.of(each.kinds[kind]) if kind in each.kinds else NONE for each in done]
        for kind in kinds_of([each.kinds for each in done])
    }
    found = {
        "Speed and memory: step time and (peak) as ratios to the baseline's": speed,
        f"Loss ({one_line(comparison.metric)}): differences from the baseline's; steps and time as ratios": {
            head: cells for head, cells in loss.items() if set(cells) - {"0", "1", NONE}
        },
        f"Sizes: what trains, what is saved, and memory at the peak by kind in {memory.name}": sizes,
    }
    return {title: columns for title, columns in found.items() if columns and done}


def kinds_of(all_kinds: Sequence[Mapping[str, int]]) -> list[str]:
    """The kinds of memory that some variants have, what takes most of any of them first."""
    most: dict[str, int] = {}
    for kinds in all_kinds:
        for kind, size in kinds.items():
            most[kind] = max(size, most.get(kind, 0))
    return sorted((kind for kind in most if most[kind]), key=lambda kind: -most[kind])


class Unit:
    """One unit, and one number of digits, for several sizes, so that they can be compared at a glance.

    Example:
        >>> Unit([1_590_000_000, 12_000_000]).of(12_000_000), Unit([3000]).name
        ('0.011', 'KiB')
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        largest = max([*sizes, 1])
        power = min(int(math.log2(largest) // 10), 3)
        self.bytes, self.name = 1024.0**power, ("B", "KiB", "MiB", "GiB")[power]
        self.digits = max(0, 3 - int(math.log10(largest / self.bytes))) if power else 0

    def of(self, size: float) -> str:
        """A size in this unit, without its name."""
        return f"{size / self.bytes:,.{self.digits}f}"


def notes(comparison: Comparison) -> list[str]:
    """How the tables are to be read."""
    done = [each for each in comparison.variants if not each.failed]
    estimates = [value for each in done for value in vars(each).values() if isinstance(value, Estimate)]
    count = sum(map(tested, estimates))
    seeds, rounds = ({getattr(each, name) for each in done} or {0} for name in ("seeds", "rounds"))
    found = [
        f"In brackets: the 95 % interval, from {_range(seeds)} seeds and {_range(rounds)} rounds. A ratio below 1 and "
        "a difference below 0 are less than the baseline's; no evidence: p > 0.05, so there may be no difference."
    ]
    if count:
        found.append(f"Of the {count} tests about {number(count / 20)} would find a difference where there is none.")
    if failed := len(comparison.variants) - len(done):
        found.append(f"{failed} of {len(comparison.variants)} variants failed.")
    return found


def facts(comparison: Comparison) -> dict[str, str]:
    """Where and how it was measured."""
    return {
        one_line(key): ", ".join(f"{name} {part}" for name, part in value.items())
        if isinstance(value, Mapping)
        else one_line(value)
        for key, value in comparison.about.items()
    }


def terminal_table(comparison: Comparison, width: int = 80) -> str:
    """The tables, side by side as far as the terminal is wide.

    Args:
        comparison: What was measured.
        width: Columns of the terminal.
    """
    names = [one_line(each.name) for each in comparison.variants if not each.failed]
    lines: list[str] = []
    for title, columns in tables(comparison).items():
        lines += [*text_lines(title, width), "", *text_table(names, columns, width), ""]
    for each in comparison.variants:
        if each.failed:
            name = one_line(each.name)
            first = min(room_of(name), width // 3)
            lines += text_row([name, f"failed: {one_line(each.failed)}"], [first, width - first - 2])
    for note in notes(comparison):
        lines += text_lines(note, width)
    return "\n".join(lines)


def markdown(comparison: Comparison) -> str:
    """The tables as Markdown."""
    done = [each for each in comparison.variants if not each.failed]
    failed = [each for each in comparison.variants if each.failed]
    command = plain(comparison.command)
    fence = "`" * (3 + max(map(len, re.findall("`+", command)), default=0))
    parts = ["# Comparison", f"{fence}bash\n{command}\n{fence}"]
    for title, columns in tables(comparison).items():
        rows = [["variant", *columns], ["---"] * (len(columns) + 1)]
        rows += [[each.name, *cells] for each, *cells in zip(done, *columns.values(), strict=True)]
        parts += [f"## {_in_markdown(title)}", _rows(rows)]
    if failed:
        parts.append(_rows([["failed", "reason"], ["---"] * 2, *([each.name, each.failed] for each in failed)]))
    parts += map(_in_markdown, notes(comparison))
    parts.append(_rows([["about", ""], ["---"] * 2, *map(list, facts(comparison).items())]))
    return "\n\n".join(parts) + "\n"


def csv_text(comparison: Comparison) -> str:
    """All numbers as they were measured, a row a variant; sizes in bytes, estimates as five columns."""
    text = io.StringIO(newline="")
    rows = numbers(comparison)
    writer = csv.writer(text)
    writer.writerow([_in_csv(head) for head in rows[0]])
    writer.writerows([_in_csv(value) for value in row.values()] for row in rows)
    return text.getvalue()


def numbers(comparison: Comparison) -> list[dict[str, object]]:
    """What was measured, a row a variant: ``time``, ``time_low``, ``kinds.weights``, ...; ``None`` is nothing."""
    rows = [dict(_numbers(each)) for each in comparison.variants]
    heads = dict.fromkeys(head for row in rows for head in row)
    return [{head: row.get(head) for head in heads} for row in rows]


def one_line(text: object) -> str:
    """A text of anybody's on one line, without what a terminal obeys."""
    return " ".join(plain(text).split())


def _beside(each: VariantResult, estimate: Estimate | None, no_difference: float, comparison: Comparison) -> str:
    """An estimate, which for the baseline is beside itself."""
    return f"{no_difference:g}" if each is comparison.variants[0] else said(estimate, no_difference)


def _planned(each: VariantResult, unit: Unit) -> str:
    if each.planned is None:
        return NONE
    error = f" ({each.planned / each.peak - 1:+.1%})".replace("%", "\N{NO-BREAK SPACE}%") if each.peak else ""
    return unit.of(each.planned) + error


def _short(value: float) -> str:
    """Three digits."""
    power = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return number(value, 10.0 ** (power - 2))


def _range(counts: set[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"


def _numbers(each: VariantResult) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(each):
        value = getattr(each, field.name)
        if "Estimate" in str(field.type):
            for part in dataclasses.fields(Estimate):
                name = field.name if part.name == "value" else f"{field.name}_{part.name}"
                yield name, None if value is None else getattr(value, part.name)
        elif isinstance(value, dict):
            yield from ((f"{field.name}.{key}", part) for key, part in value.items())
        elif not isinstance(value, list):
            yield field.name, value


def _in_csv(value: object) -> object:
    """A number as it is; a text such that no spreadsheet takes it for a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n", "'") else text


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(map(_in_markdown, row))} |" for row in rows)


def _in_markdown(text: str) -> str:
    """A text that Markdown shows as it is written, in a table, too."""
    marked = re.sub(r"[\\`*|~$]|\[(?![-\d.,ekMG ]+\](?!\())|(?<!\w)_|_(?!\w)|(?<=:)(?=//)", r"\\\g<0>", one_line(text))
    return marked.replace("&", "&amp;").replace("<", "&lt;")

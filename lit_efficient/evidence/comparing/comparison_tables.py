"""What ``compare`` measured, as text: tables for a terminal and for Markdown, raw numbers for CSV.

Ratios and differences stand with their 95 % interval, and with "no evidence" where p > 0.05.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lit_efficient.evidence.comparing.comparison import Comparison, Estimate, VariantResult
from lit_efficient.evidence.comparing.comparison_charts import kinds_of
from lit_efficient.evidence.reporting.line_chart import Unit, number
from lit_efficient.evidence.reporting.markup import plain
from lit_efficient.evidence.reporting.text_table import room_of, text_lines, text_row, text_table

NONE = "-"
_TWO_DIGITS = 3.55  # half an interval of 0.035 is given in two digits, of 0.036 in one
_MORE_DIGITS = 3  # to tell a bound from no difference
Columns = Mapping[str, Sequence[str]]


def said(estimate: Estimate | None, no_difference: float) -> str:
    """An estimate for people, in as many digits as its interval warrants.

    Args:
        estimate: What was measured.
        no_difference: What it is between equals: 1 for a ratio, 0 for a difference; an interval that excludes it is
            written such that one sees that.

    Example:
        >>> said(Estimate(0.9312, 0.91, 0.953, 0.2, 5), 1).replace("\N{NO-BREAK SPACE}", " ")
        '0.931 [0.910, 0.953], no evidence'
    """
    if estimate is None or not math.isfinite(estimate.value):
        return NONE
    value, low, high = estimate.value, estimate.low, estimate.high
    p, half = estimate.p, (high - low) / 2
    lack = "not tested" if p is None or math.isnan(p) else "" if estimate.evidence else "no evidence"
    evidence = ", " + lack.replace(" ", "\N{NO-BREAK SPACE}") if lack else ""
    if not 0 < half < math.inf:
        return number(value) + evidence
    power = math.floor(math.log10(half))
    step = 10.0 ** (power - (half / 10.0**power < _TWO_DIGITS))
    ends = [end for end in (low, high) if end != no_difference]
    for _ in range(_MORE_DIGITS):
        step /= 10 if any(round(end / step) == round(no_difference / step) for end in ends) else 1
    texts = [number(each, step, max(abs(value), abs(low), abs(high))) for each in (value, low, high)]
    return "{} [{},\N{NO-BREAK SPACE}{}]".format(*texts) + evidence


def tables(comparison: Comparison) -> dict[str, Columns]:
    """Tables by their titles, each of columns by their heads, with a cell for each variant that did not fail."""
    done = [each for each in comparison.variants if not each.failed]
    if not done:
        return {}
    memory, files = Unit([each.peak for each in done]), Unit([each.checkpoint_bytes for each in done])
    units = sorted({one_line(each.unit) for each in done})
    own = " {}" if len(units) > 1 else ""

    def beside(name: str, no_difference: float) -> list[str]:
        cells = [said(getattr(each, name), no_difference) for each in done]
        baseline = done[0] is comparison.variants[0]
        return [f"{no_difference:g}", *cells[1:]] if baseline else cells

    def known(values: Sequence[float]) -> list[str]:
        return [number(value) if math.isfinite(value) else NONE for value in values]

    speed = {
        "step time, ratio": beside("time", 1),
        f"{' or '.join(units)} a second": [number(each.rate.value) + own.format(one_line(each.unit)) for each in done],
        f"peak memory, {memory.name}": [
            memory.of(each.peak) + _ratio(each.peak_ratio) if each.peak else NONE for each in done
        ],
        f"planned, {memory.name}": [_planned(each, memory) for each in done],
    }
    loss = {
        "at the end": known([each.final_loss for each in done]),
        "difference at equal steps": beside("loss", 0),
        "difference at equal time": beside("loss_at_time", 0),
        "steps to equal, ratio": beside("steps_to_loss", 1),
        "time to equal, ratio": beside("time_to_loss", 1),
        "forgotten": known([each.forgotten for each in done]),
        "difference in forgetting": beside("forgetting", 0),
    }
    sizes = {
        "trained parameters": [number(each.trainable) for each in done],
        f"checkpoint, {files.name}": [files.of(each.checkpoint_bytes) for each in done],
    } | {
        one_line(kind): [memory.of(each.kinds[kind]) if kind in each.kinds else NONE for each in done]
        for kind in kinds_of([each.kinds for each in done])
    }
    found = {
        "Speed and memory": speed,
        f"Loss ({one_line(comparison.metric)})": {
            k: cells for k, cells in loss.items() if set(cells) - {"0", "1", NONE}
        },
        f"Sizes, and memory at the peak by kind in {memory.name}": sizes,
    }
    return {title: columns for title, columns in found.items() if columns}


def notes(comparison: Comparison) -> list[str]:
    """How the tables are to be read."""
    done = [each for each in comparison.variants if not each.failed]
    seeds, rounds = ({getattr(each, name) for each in done} or {0} for name in ("seeds", "rounds"))
    found = [
        f"In brackets: the 95 % interval, from {_range(seeds, 'seed')} and {_range(rounds, 'round')}. In parentheses: "
        "the ratio to the baseline's peak; how wrong the planned peak is. No evidence: p > 0.05, so there may be no "
        "difference from the baseline; p allows for the number of variants (Holm), an interval does not. "
        "Not tested: too few runs, or all alike."
    ]
    if comparison.about.get("settled") is False:
        found.append("The time was over before all intervals were as narrow as was asked: the same command goes on.")
    if names := ", ".join(map(one_line, left_out(comparison))):
        found.append(f"Left out, as they cannot be added to this fit: {names}.")
    for word, count in Counter(_outcome(each) for each in comparison.variants if each.failed).items():
        found.append(f"{count} of {len(comparison.variants)} variants {'were not run' if word == _NOT_RUN else word}.")
    found += [f"{one_line(each.name)}: {one_line(text)}." for each in done for text in each.remarks]
    return found


def left_out(comparison: Comparison) -> Mapping[str, str]:
    """What could not be compared, each with its reason."""
    found = comparison.about.get("left_out")
    return found if isinstance(found, Mapping) else {}


def facts(comparison: Comparison) -> dict[str, str]:
    """Where and how it was measured."""
    found = {}
    for key, value in comparison.about.items():
        parts = value.items() if isinstance(value, Mapping) else []
        found[one_line(key)] = one_line(", ".join(f"{name} {part}" for name, part in parts) if parts else value)
    return {key: text for key, text in found.items() if key not in ("left_out", "settled", "fit")}


def terminal_table(comparison: Comparison, width: int = 80) -> str:
    """The tables, side by side as far as the terminal is wide."""
    names = [one_line(each.name) for each in comparison.variants if not each.failed]
    lines: list[str] = []
    for title, columns in tables(comparison).items():
        lines += [*text_lines(title, width), "", *text_table(names, columns, width), ""]
    nothing = [(each, "" if _outcome(each) == _NOT_RUN else "failed: ") for each in comparison.variants if each.failed]
    failed = [(one_line(each.name), word + one_line(each.failed)) for each, word in nothing]
    first = min(max((room_of(name) for name, _ in failed), default=0), width // 3)
    lines += [line for row in failed for line in text_row(row, [first, width - first - 2])] + [""] * bool(failed)
    return "\n".join([*lines, *(line for note in notes(comparison) for line in text_lines(note, width))])


_NOT_RUN = "not run"  # how the reason begins of what has not been tried


def _outcome(variant: VariantResult) -> str:
    return _NOT_RUN if variant.failed.startswith(_NOT_RUN) else "failed"


def markdown(comparison: Comparison) -> str:
    """The tables as Markdown."""
    done = [each for each in comparison.variants if not each.failed]
    command = plain(comparison.command)
    fence = "`" * (3 + max(map(len, re.findall("`+", command)), default=0))
    parts = ["# Comparison", *[f"{fence}bash\n{command}\n{fence}"] * bool(command)]
    for title, columns in tables(comparison).items():
        rows = [["variant", *columns], ["---"] * (len(columns) + 1)]
        rows += [[each.name, *cells] for each, *cells in zip(done, *columns.values(), strict=True)]
        parts += [f"## {_in_markdown(title)}", _rows(rows)]
    failed = {each.name: each.failed for each in comparison.variants if each.failed}
    for title, reasons in {"failed": failed, "left out": left_out(comparison)}.items():
        parts += [_rows([[title, "reason"], ["---"] * 2, *map(list, reasons.items())])] * bool(reasons)
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


def _planned(each: VariantResult, unit: Unit) -> str:
    if each.planned is None:
        return NONE
    error = f" ({each.planned / each.peak - 1:+.1%})".replace("%", "\N{NO-BREAK SPACE}%") if each.peak else ""
    return unit.of(each.planned) + error


def _ratio(value: float) -> str:
    return f" ({number(value, value / 100)})" if value > 0 else ""


def _range(counts: set[int], of: str) -> str:
    least = f"{min(counts)} to " if len(counts) > 1 else ""
    return f"{least}{max(counts)} {of}{'s' * (max(counts) != 1)}"


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

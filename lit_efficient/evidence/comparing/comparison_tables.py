"""Results of ``compare`` as text: tables for a terminal and for Markdown, raw numbers for CSV.

Ratios and differences are given with their 95 % confidence interval, and with "no evidence" where p > 0.05.
"""

import csv
import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from lit_efficient.evidence.comparing.comparison import ESTIMATES, Comparison, VariantResult
from lit_efficient.evidence.comparing.comparison_charts import kinds_of
from lit_efficient.evidence.comparing.estimates import Estimate
from lit_efficient.evidence.reporting.line_chart import Unit, number
from lit_efficient.evidence.reporting.pages import plain
from lit_efficient.evidence.reporting.text_table import room_of, text_lines, text_row, text_table

NONE = "-"  # cell without a value
NOT_RUN = "not run"  # first words of the reason why a variant was not tried
_TWO_DIGITS = 3.55  # half an interval of 0.035 is shown with two digits, one of 0.036 with one
_MORE_DIGITS = 3  # extra digits at most, to tell a bound from no difference
_SPACE = "\N{NO-BREAK SPACE}"
Columns: TypeAlias = Mapping[str, Sequence[str]]  # by heading, a cell for each variant


def said(estimate: Estimate | None, no_difference: float) -> str:
    """Return an estimate with its interval, in as many digits as the interval justifies.

    Args:
        estimate: The estimate.
        no_difference: Value between equals: 1 for a ratio, 0 for a difference. An interval that excludes this value
            is shown with enough digits to see that.

    Example:
        >>> said(Estimate(0.9312, 0.91, 0.953, 0.2, 5), 1).replace("\N{NO-BREAK SPACE}", " ")
        '0.931 [0.910, 0.953], no evidence'
    """
    if estimate is None or not math.isfinite(estimate.value):
        return NONE
    remark = ""
    if estimate.p is None or math.isnan(estimate.p):
        remark = f", not{_SPACE}tested"
    elif not estimate.evidence:
        remark = f", no{_SPACE}evidence"
    half = (estimate.high - estimate.low) / 2
    if not 0 < half < math.inf:
        return number(estimate.value) + remark
    # One digit of half the interval is shown, or two if its first digit is small.
    power = math.floor(math.log10(half))
    if half / 10.0**power < _TWO_DIGITS:
        power -= 1
    step = 10.0**power
    ends = [end for end in (estimate.low, estimate.high) if end != no_difference]
    for _ in range(_MORE_DIGITS):
        if any(round(end / step) == round(no_difference / step) for end in ends):
            step /= 10
    parts = (estimate.value, estimate.low, estimate.high)
    largest = max(abs(part) for part in parts)
    value, low, high = (number(part, step, largest) for part in parts)
    return f"{value} [{low},{_SPACE}{high}]{remark}"


def tables(comparison: Comparison) -> dict[str, Columns]:
    """Return the tables by title. Their rows are the variants that did not fail."""
    done = comparison.done
    if not done:
        return {}
    memory = Unit([each.peak for each in done])
    files = Unit([each.checkpoint_bytes for each in done])
    units = sorted({one_line(each.unit) for each in done})
    rates = [number(each.rate.value) for each in done]
    if len(units) > 1:
        rates = [f"{rate} {one_line(each.unit)}" for rate, each in zip(rates, done)]

    def compared(name: str, no_difference: float) -> list[str]:
        cells = [said(getattr(each, name), no_difference) for each in done]
        # If the baseline failed, the first row is another variant.
        if done[0] is comparison.variants[0]:
            cells[0] = f"{no_difference:g}"  # the baseline, compared with itself
        return cells

    speed = {
        "step time, ratio": compared("time", 1),
        f"{' or '.join(units)} a second": rates,
        f"peak memory, {memory.name}": [_peak(each, memory) for each in done],
        f"planned, {memory.name}": [_planned(each, memory) for each in done],
    }
    losses = {
        "at the end": _known(each.final_loss for each in done),
        "difference at equal steps": compared("loss", 0),
        "difference at equal time": compared("loss_at_time", 0),
        "steps to equal, ratio": compared("steps_to_loss", 1),
        "time to equal, ratio": compared("time_to_loss", 1),
        "forgotten": _known(each.forgotten for each in done),
        "difference in forgetting": compared("forgetting", 0),
    }
    sizes = {
        "trained parameters": [number(each.trainable) for each in done],
        f"checkpoint, {files.name}": [files.of(each.checkpoint_bytes) for each in done],
    }
    for kind in kinds_of(done):
        sizes[one_line(kind)] = [memory.of(each.kinds[kind]) if kind in each.kinds else NONE for each in done]
    return {
        "Speed and memory": speed,
        # Columns without any result are left out.
        f"Loss ({one_line(comparison.metric)})": {
            head: cells for head, cells in losses.items() if set(cells) - {"0", "1", NONE}
        },
        f"Sizes, and memory at the peak by kind in {memory.name}": sizes,
    }


def _known(values: Iterable[float]) -> list[str]:
    return [number(value) if math.isfinite(value) else NONE for value in values]


def _peak(each: VariantResult, unit: Unit) -> str:
    if not each.peak:
        return NONE
    if not each.peak_ratio > 0:
        return unit.of(each.peak)
    return f"{unit.of(each.peak)} ({number(each.peak_ratio, each.peak_ratio / 100)})"


def _planned(each: VariantResult, unit: Unit) -> str:
    if each.planned is None:
        return NONE
    text = unit.of(each.planned)
    if each.peak:
        text += f" ({100 * (each.planned / each.peak - 1):+.1f}{_SPACE}%)"
    return text


def notes(comparison: Comparison) -> list[str]:
    """Return sentences that explain the tables, and remarks on variants."""
    done = comparison.done
    seeds = _range([each.seeds for each in done], "seed")
    rounds = _range([each.rounds for each in done], "round")
    # The notes follow the order in which readers meet the marks in the tables.
    found = [
        f"In brackets: the 95 % confidence interval, from {seeds} and {rounds}. In parentheses: the ratio to the "
        "baseline's peak, and the error of the planned peak. No evidence: p > 0.05, so there may be no difference from "
        "the baseline. p is corrected for the number of variants (Holm); intervals are not. Not tested: there are too "
        "few runs, or all are alike."
    ]
    if comparison.about.get("settled") is False:
        found.append("The time ran out before all intervals were narrow enough. The same command continues.")
    names = ", ".join(one_line(name) for name in left_out(comparison))
    if names:
        found.append(f"Left out, as they cannot be added to this fit: {names}.")
    for outcome, count in Counter(_outcome(each) for each in comparison.variants if each.failed).items():
        found.append(f"{count} of {len(comparison.variants)} variants {outcome}.")
    for each in done:
        found += [f"{one_line(each.name)}: {one_line(text)}." for text in each.remarks]
    return found


def _range(counts: Sequence[int], unit: str) -> str:
    least = min(counts, default=0)
    most = max(counts, default=0)
    text = f"{most} {unit}"
    if most != 1:
        text += "s"
    if least < most:
        text = f"{least} to {text}"
    return text


def _outcome(variant: VariantResult) -> str:
    if variant.failed.startswith(NOT_RUN):
        return "were not run"
    return "failed"


def left_out(comparison: Comparison) -> Mapping[str, str]:
    """Return the names of the changes that could not be compared, with their reasons."""
    found = comparison.about.get("left_out", {})
    assert isinstance(found, Mapping)
    return found


def facts(comparison: Comparison) -> dict[str, str]:
    """Return the versions, the machine and the settings of a comparison as text."""
    found = {}
    for key, value in comparison.about.items():
        text = value
        if isinstance(value, Mapping) and value:
            text = ", ".join(f"{name} {part}" for name, part in value.items())
        if key not in ("left_out", "settled", "fit"):
            found[one_line(key)] = one_line(text)
    return found


def terminal_table(comparison: Comparison, width: int = 80) -> str:
    """Return the tables for a terminal of ``width`` columns. Columns without room follow below."""
    # Names come from users and may contain line breaks and terminal escapes.
    names = [one_line(each.name) for each in comparison.done]
    lines: list[str] = []
    for title, columns in tables(comparison).items():
        lines += [*text_lines(title, width), "", *text_table(names, columns, width), ""]
    failed = []
    for each in comparison.variants:
        if each.failed:
            text = one_line(each.failed)
            if not text.startswith(NOT_RUN):
                text = f"failed: {text}"
            failed.append((one_line(each.name), text))
    if failed:
        first = min(max(room_of(name) for name, _ in failed), width // 3)
        for row in failed:
            lines += text_row(row, [first, width - first - 2])
        lines.append("")
    for note in notes(comparison):
        lines += text_lines(note, width)
    return "\n".join(lines)


def markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown."""
    parts = ["# Comparison"]
    command = plain(comparison.command)
    if command:
        # A fence must be longer than any run of backticks in the command.
        fence = "`" * (3 + max(map(len, re.findall("`+", command)), default=0))
        parts.append(f"{fence}bash\n{command}\n{fence}")
    names = [each.name for each in comparison.done]
    for title, columns in tables(comparison).items():
        parts.append(f"## {_in_markdown(title)}")
        parts.append(_markdown_table(["variant", *columns], zip(names, *columns.values(), strict=True)))
    failed = {each.name: each.failed for each in comparison.variants if each.failed}
    for title, reasons in {"failed": failed, "left out": left_out(comparison)}.items():
        if reasons:
            parts.append(_markdown_table([title, "reason"], reasons.items()))
    parts += [_in_markdown(note) for note in notes(comparison)]
    parts.append(_markdown_table(["about", ""], facts(comparison).items()))
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)


def _in_markdown(text: str) -> str:
    """Escape a text so that Markdown shows it as it is written, in a table too."""
    # Brackets of intervals stay as they are, as long as they cannot begin a link.
    marked = re.sub(r"[\\`*|~$]|\[(?![-\d.,ekMG ]+\](?!\())|(?<!\w)_|_(?!\w)|(?<=:)(?=//)", r"\\\g<0>", one_line(text))
    return marked.replace("&", "&amp;").replace("<", "&lt;")


def csv_text(comparison: Comparison) -> str:
    """Return all measured numbers as CSV, a row for each variant; sizes are in bytes."""
    text = io.StringIO(newline="")
    rows = numbers(comparison)
    writer = csv.writer(text)
    writer.writerow([_in_csv(head) for head in rows[0]])
    writer.writerows([_in_csv(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _in_csv(value: object) -> object:
    """Return a number as it is, and a text so that no spreadsheet takes it for a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    # Spreadsheets show a text after an apostrophe as it is, and take these characters for the start of a formula.
    if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "'")):
        text = f"'{text}"
    return text


def numbers(comparison: Comparison) -> list[dict[str, object]]:
    """Return what was measured, a row for each variant: ``time``, ``time_low``, ``kinds.weights``, ...

    ``None`` stands for a missing value.
    """
    rows = [_numbers(each) for each in comparison.variants]
    heads = dict.fromkeys(head for row in rows for head in row)
    return [{head: row.get(head) for head in heads} for row in rows]


def _numbers(each: VariantResult) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, value in vars(each).items():
        if name in ESTIMATES:
            row[name] = getattr(value, "value", None)
            for part in dataclasses.fields(Estimate)[1:]:
                row[f"{name}_{part.name}"] = getattr(value, part.name, None)
        elif isinstance(value, dict):
            row |= {f"{name}.{key}": part for key, part in value.items()}
        elif not isinstance(value, list):
            row[name] = value
    return row


def one_line(text: object) -> str:
    """Return a value as one line of text without terminal escapes."""
    return " ".join(plain(text).split())

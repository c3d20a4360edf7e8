"""Tables for a terminal of any width: cells wrap, and columns that have no room come below, beside the names again."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

_NAME, _NARROWEST = 16, 20  # columns that names get if they need them; of a terminal
_BETWEEN = 2  # cells


def text_table(names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table; a no-break space keeps words together and is printed as a space.

    Args:
        names: What the rows are.
        columns: Cells for each row, by their heads.
        width: Columns of the terminal.

    Example:
        >>> for line in text_table(["plain", "EMA"], {"time": ["1", "1.02, not tested"], "memory": ["1", "1.2"]}, 24):
        ...     print(line)
               time       memory
        plain  1          1
        EMA    1.02, not  1.2
               tested
    """
    for place, (heads, widths) in enumerate(_blocks(names, columns, max(width, _NARROWEST))):
        yield from [""] * (place > 0)
        for row in (["", *heads], *zip(names, *(columns[head] for head in heads), strict=True)):
            yield from text_row(row, widths)


def text_row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of cells that stand side by side."""
    wrapped = [text_lines(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for i in range(max(map(len, wrapped))):
        parts = [lines[i] if i < len(lines) else "" for lines in wrapped]
        line = (" " * _BETWEEN).join(part + " " * (room - room_of(part)) for part, room in zip(parts, widths))
        yield line.rstrip().replace("\N{NO-BREAK SPACE}", " ")


def _blocks(
    names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Yield as many columns as fit beside the names, and the widths of all, until all columns are there."""
    name_width = max(map(room_of, names), default=0)
    left = list(columns)
    while left:
        heads: list[str] = []
        widths = [min(name_width, _NAME, width // 3)]
        for head in left:
            words = [word for cell in (head, *columns[head]) for word in cell.split(" ")]
            least = min(max(map(room_of, words)), width - widths[0] - _BETWEEN)
            if sum(widths) + _BETWEEN * len(widths) + least > width:
                break
            heads.append(head)
            widths.append(least)
        whole = [name_width, *(max(map(room_of, (head, *columns[head]))) for head in heads)]
        for i, wish in enumerate(whole):  # what is left makes fewer cells wrap
            widths[i] += max(0, min(wish - widths[i], width - sum(widths) - _BETWEEN * (len(widths) - 1)))
        yield heads, widths
        left = left[len(heads) :]


def text_lines(text: str, width: int) -> list[str]:
    """A text in lines of a width, in columns of a terminal; longer words are broken, best behind a _."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and room_of(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
            continue
        lines += [""] if lines[-1] else []
        for part in re.split(r"(?<=_)", word):
            lines += [""] if lines[-1] and room_of(lines[-1] + part) > width else []
            for letter in part:
                lines += [""] if lines[-1] and room_of(lines[-1] + letter) > width else []
                lines[-1] += letter
    return lines


def room_of(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)

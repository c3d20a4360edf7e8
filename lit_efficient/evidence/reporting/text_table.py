"""Tables for a terminal of any width. Cells wrap, and columns without room follow below, with the names again."""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

_NAME = 16  # columns that the names get at least, if they need them
_NARROWEST = 20  # columns of a terminal
_BETWEEN = 2  # columns between cells


def text_table(names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table. A no-break space keeps words together and is printed as a space.

    Args:
        names: Names of the rows.
        columns: For each heading a cell for each row.
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
        if place:
            yield ""
        yield from text_row(["", *heads], widths)
        for row in zip(names, *(columns[head] for head in heads), strict=True):
            yield from text_row(row, widths)


def text_row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of one row of cells."""
    wrapped = [text_lines(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for i in range(max(len(lines) for lines in wrapped)):
        parts = []
        for lines, width in zip(wrapped, widths):
            part = "".join(lines[i : i + 1])
            parts.append(part + " " * (width - room_of(part)))
        yield (" " * _BETWEEN).join(parts).rstrip().replace("\N{NO-BREAK SPACE}", " ")


def _blocks(
    names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the headings that fit next to the names, with the widths of all columns, until no heading is left."""
    name_width = max((room_of(name) for name in names), default=0)
    left = list(columns)
    while left:
        heads: list[str] = []
        widths = [min(name_width, _NAME, width // 3)]
        for head in left:
            words = [word for cell in (head, *columns[head]) for word in cell.split(" ")]
            least = min(max(room_of(word) for word in words), width - widths[0] - _BETWEEN)
            # The other columns follow below.
            if sum(widths) + _BETWEEN * len(widths) + least > width:
                break
            heads.append(head)
            widths.append(least)
        # The rest of the width goes to the first columns whose cells would wrap.
        whole = [name_width, *(max(room_of(cell) for cell in (head, *columns[head])) for head in heads)]
        for i, wish in enumerate(whole):
            spare = width - sum(widths) - _BETWEEN * (len(widths) - 1)
            widths[i] += max(0, min(wish - widths[i], spare))
        yield heads, widths
        left = left[len(heads) :]


def text_lines(text: str, width: int) -> list[str]:
    """Wrap a text to a width in terminal columns. Longer words are broken, after an underscore if possible."""
    lines = [""]

    def put(part: str) -> None:
        if lines[-1] and room_of(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part

    # Only spaces separate words: a no-break space keeps them together.
    for word in text.split(" "):
        if lines[-1] and room_of(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
            continue
        if lines[-1]:
            lines.append("")
        for part in re.split(r"(?<=_)", word):
            if room_of(part) <= width:
                put(part)
            else:
                for letter in part:
                    put(letter)
    return lines


def room_of(text: str) -> int:
    """Return the number of terminal columns of a text: wide characters take two, combining characters none."""
    columns = 0
    for letter in text:
        if not unicodedata.combining(letter):
            columns += 1 + (unicodedata.east_asian_width(letter) in "WF")
    return columns

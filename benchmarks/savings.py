"""Draw what techniques save on a small GPT, from records/figures.json, into docs/savings.svg.

    python -m benchmarks.savings

The picture has a row for each technique whose record in the table ``techniques`` has a peak of memory of at most
``LIMIT`` of the training without it: one bar for the memory, one for the time of a step.
"""

import re
from dataclasses import dataclass
from html import escape

import lit_efficient
from benchmarks.figures import RECORDS, ROOT, networks_of

FILE = ROOT / "docs" / "savings.svg"
LIMIT = 0.9
WIDTH, NAMES, VALUE, UNIT, ROW, TOP = 440, 176, 32, 145, 32, 118  # UNIT: the length of a bar of 1
SAME, OTHER, TEXT, LINE = "#0072b2", "#e69f00", "#222222", "#999999"


@dataclass(frozen=True)
class Saving:
    """Ratios of a training with a technique to the same training without it."""

    name: str
    memory: float
    time: float
    same: bool  # the result differs by the order of sums only


def savings() -> list[Saving]:
    """Return the techniques of the picture, the one that saves most memory first."""
    found = []
    for record in RECORDS.values():
        figures = record["figures"]
        if record.get("table") != "techniques" or "peak" not in figures:
            continue
        if not networks_of(record["cells"][0]).startswith("GPT"):  # another network than the picture's
            continue
        memory, time = (figures[key].split(" / ")[0] for key in ("peak", "time"))  # the GPT is the first of three
        if "-" in (memory, time) or float(memory) > LIMIT:
            continue
        same = getattr(getattr(lit_efficient, record["technique"]), "computes", "other") == "same"
        name = re.sub(r"\b(\w+) \(nf4, with LoRA\(.*", r"\1 with LoRA", record["cells"][0].replace("`", ""))
        found.append(Saving(name.partition(" (")[0], float(memory), float(time), same))
    return sorted(found, key=lambda one: (one.memory, one.time))


def picture() -> str:
    """Return the text of the picture. It is narrow, so that a phone shows its text in a readable size."""
    rows = savings()
    bottom = TOP + ROW * len(rows)
    height = bottom + 10
    left = NAMES + VALUE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "A small GPT with one technique,", size=15),
        _text(12, 41, "as a share of the same training without it", size=15),
        _text(12, 64, "Thick bar: peak memory. Thin bar: CPU time of a step."),
        *_legend(12, SAME, "same result"),
        *_legend(112, OTHER, "changes the result"),
    ]
    for number, row in enumerate(rows):
        top = TOP + ROW * number
        colour = SAME if row.same else OTHER
        lines.append(_text(NAMES - 8, top + 16, row.name, anchor="end"))
        for at, thick, value in ((top, 13, row.memory), (top + 16, 6, row.time)):
            lines.append(f'<rect x="{left}" y="{at}" width="{value * UNIT:.1f}" height="{thick}" fill="{colour}"/>')
            lines.append(_text(left - 6, at + (11 if thick > 6 else 8), f"{value:.2f}", size=11, anchor="end"))
    at = left + UNIT  # the training without a technique
    lines.append(f'<path d="M{at} {TOP - 6}V{bottom - 6}" stroke="{LINE}" stroke-dasharray="3 3"/>')
    lines.append(_text(at, TOP - 10, "1", anchor="middle"))
    return "\n".join([*lines, "</svg>", ""])


def _legend(left: int, colour: str, words: str) -> list[str]:
    square = f'<rect x="{left}" y="74" width="12" height="12" fill="{colour}"/>'
    return [square, _text(left + 18, 85, words)]


def _text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{TEXT}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE)

"""Pictures of a comparison as inline SVG: memory against step time with the frontier, and bars of memory by kind."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup

from lit_efficient.evidence.comparing.comparison import VariantResult
from lit_efficient.evidence.reporting.line_chart import COLOURS, RIGHT, WIDTH, Axis, Point, Unit, number
from lit_efficient.evidence.reporting.pages import rendered
from lit_efficient.evidence.reporting.text_table import room_of

# Top and bottom of the plot area.
_TOP = 26
_BOTTOM = 276
# Width and height of a letter.
_LETTER = 6.2
_LINE = 12
_GAP = 3  # between labels
_LONGEST = 24  # letters of a label
_REACHES = (8, 16, 27, 40, 56, 74)  # distances of a label from its point, the best first
_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.6), (-0.8, -0.6), (0.8, 0.6), (-0.8, 0.6))
_LOGARITHMIC = 5  # ratio of the largest to the smallest value above which an axis is logarithmic
_LEAST = 1e-9  # smallest value of a logarithmic axis
_OTHER = "other"  # kind of memory
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class _Spot:
    """A variant in the picture."""

    x: float
    y: float
    colour: str
    words: str


@dataclass(frozen=True)
class _Label:
    text: str
    x: float
    y: float
    anchor: str
    box: Box
    leads: bool  # whether a line leads from the label to its point


@dataclass(frozen=True)
class _Part:
    """A piece of a bar, in bytes."""

    kind: str
    start: int
    size: int
    colour: str


@dataclass(frozen=True)
class _Bar:
    name: str
    label: str
    peak: int
    planned: int | None
    parts: list[_Part]
    end: int  # of the bar, or of the mark of the plan


def frontier(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that no other point beats, from left to right.

    A point beats another if it is at most as large in both coordinates and smaller in one.
    """
    # From left to right, a point is on the frontier if it is lower than all before it.
    found: list[int] = []
    for i in sorted(range(len(points)), key=points.__getitem__):
        if not found or points[i][1] < points[found[-1]][1] or points[i] == points[found[-1]]:
            found.append(i)
    return found


def scatter(variants: Sequence[VariantResult]) -> tuple[Markup, list[int], dict[int, str]]:
    """Draw memory against step time. Both must be known for every variant; the baseline is the first one.

    Returns:
        The picture, the indices of the frontier, and the label of each index that has room for one. A label is the
        name of the variant, or its number from 1 if the name has no room.
    """
    points = [(each.time.value, each.peak_ratio) for each in variants]
    best = frontier(points)
    # Intervals that are far wider than the points are apart are cut off.
    least = min(points)[0] / 2
    most = max(points)[0] * 2
    bounds = [end for each in variants for end in (each.time.low, each.time.high) if least < end < most]
    y_axis = _axis([memory for _, memory in points], _BOTTOM, _TOP)
    x_axis = _axis([*bounds, *(time for time, _ in points)], y_axis.room(), RIGHT)
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
    # The line along the frontier is an obstacle for labels, and so are the intervals.
    stairs = _stairs([places[i] for i in best])
    whiskers = [_whisker(each, x_axis, y) for each, (_, y) in zip(variants, places)]
    steps = [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in itertools.pairwise(stairs)]
    # Labels of the frontier get the best places.
    order = [*best, *(i for i in range(len(points)) if i not in best)]
    area = (x_axis.start, _TOP, RIGHT, _BOTTOM)
    labels = _labels([each.name for each in variants], places, order, [*whiskers, *steps], area)
    spots = []
    for i, each in enumerate(variants):
        colour = "line7"
        if i == 0:
            colour = "line1"
        elif i in best:
            colour = "line0"
        words = f"{each.name}: step time {number(each.time.value)}, peak memory {number(each.peak_ratio)}"
        spots.append(_Spot(*places[i], colour, words))
    drawing = rendered(
        "scatter.svg",
        width=WIDTH,
        x_axis=x_axis,
        y_axis=y_axis,
        points=spots,
        stairs=stairs,
        whiskers=whiskers,
        labels=labels,
        frontier=", ".join(variants[i].name for i in best),
    )
    return drawing, best, {i: label.text for i, label in sorted(labels.items())}


def bars(variants: Sequence[VariantResult], kinds: Sequence[str], unit: Unit) -> Markup:
    """Draw a bar of memory by kind for each variant, whose peak must be known, and a mark at its planned peak."""
    drawn = []
    for each in variants:
        sizes = {kind: each.kinds.get(kind, 0) for kind in kinds}
        known = sum(each.kinds.values())
        if _OTHER in sizes:
            # Kinds without a colour of their own are drawn together.
            sizes[_OTHER] += known - sum(sizes.values())
        parts = []
        start = 0
        for i, (kind, size) in enumerate({**sizes, "not known": each.peak - known}.items()):
            colour = f"line{i}"
            if i == len(kinds):
                colour = "rest"
            if size > 0:
                parts.append(_Part(kind, start, size, colour))
                start += size
        end = max(start, each.planned or 0)
        drawn.append(_Bar(each.name, _cut(each.name, 60), each.peak, each.planned, parts, end))
    # The rest of the width is for the number behind the longest bar.
    scale = (WIDTH - 70) / max(max(bar.peak, bar.end) for bar in drawn)
    return rendered("bars.svg", width=WIDTH, bars=drawn, unit=unit, scale=scale)


def shown_kinds(variants: Sequence[VariantResult]) -> list[str]:
    """Return the kinds of memory that have a colour, the largest first. If there are too many, the last is "other"."""
    found = kinds_of(variants)
    if len(found) <= COLOURS:
        return found
    named = [kind for kind in found if kind != _OTHER]
    return [*named[: COLOURS - 1], _OTHER]


def kinds_of(variants: Sequence[VariantResult]) -> list[str]:
    """Return the kinds of memory that the variants have, in order of their largest sizes."""
    most: dict[str, int] = {}
    for each in variants:
        for kind, size in each.kinds.items():
            most[kind] = max(size, most.get(kind, 0))
    return sorted((kind for kind in most if most[kind]), key=lambda kind: -most[kind])


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low = min(values)
    high = max(values)
    return Axis(low, high, start, end, log=_LEAST < low < high / _LOGARITHMIC, margin=0.06)


def _stairs(best: Sequence[Point]) -> list[Point]:
    """Return the corners of the line along the frontier, from the top of the picture to its right edge."""
    corners = [(best[0][0], float(_TOP)), best[0]]
    for (_, y), point in itertools.pairwise(best):
        corners += [(point[0], y), point]
    return [*corners, (float(RIGHT), corners[-1][1])]


def _whisker(each: VariantResult, axis: Axis, y: float) -> Box:
    """Return the part of the interval of the time that is inside the picture, as a box without height."""
    ends = []
    for end in (each.time.low, each.time.high):
        # A single run has no interval, which is drawn as a point.
        value = end
        if not math.isfinite(end):
            value = each.time.value
        place = axis.start
        if value > 0 or not axis.log:
            place = min(max(axis.at(value), axis.start), axis.end)
        ends.append(place)
    return ends[0], y, ends[1], y


def _labels(
    names: Sequence[str], places: Sequence[Point], order: Iterable[int], lines: Sequence[Box], area: Box
) -> dict[int, _Label]:
    """Return the labels that have room: names that cross no line if possible, else names, else numbers from 1."""
    found: dict[int, _Label] = {}
    dots = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for i in order:
        labels = [label.box for label in found.values()]
        name = _cut(names[i])
        for text, avoided in ((name, lines), (name, ()), (str(i + 1), ())):
            label = _placed(text, places[i], area, [*dots, *labels, *avoided], labels)
            if label is not None:
                found[i] = label
                break
    return found


def _placed(text: str, point: Point, area: Box, taken: Sequence[Box], labels: Sequence[Box]) -> _Label | None:
    """Place a text near a point, away from everything that is taken. The line to the point crosses no label."""
    width = _LETTER * (room_of(text) + 0.4 * sum(letter.isupper() for letter in text))  # capitals are wider
    for reach, (right, down) in itertools.product(_REACHES, _DIRECTIONS):
        x = point[0] + reach * right
        y = point[1] + reach * down
        left = x - width / 2
        anchor = "middle"
        if right > 0:
            left = x
            anchor = "start"
        elif right < 0:
            left = x - width
            anchor = "end"
        box = (left, y - _LINE / 2, left + width, y + _LINE / 2)
        inside = area[0] <= box[0] and area[1] <= box[1] and box[2] <= area[2] and box[3] <= area[3]
        # The line to the point is sampled at a few places, which is exact enough for boxes of this size.
        way = [(point[0] + reach * right * k / 8, point[1] + reach * down * k / 8) for k in range(8)]
        crossed = any(a <= p <= c and b <= q <= d for a, b, c, d in labels for p, q in way)
        if inside and not crossed and not any(_overlap(box, other) for other in taken):
            return _Label(text, x, y, anchor, box, leads=reach > _REACHES[0])
    return None


def _overlap(a: Box, b: Box) -> bool:
    return a[0] - _GAP < b[2] and b[0] < a[2] + _GAP and a[1] < b[3] and b[1] < a[3]


def _cut(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest - 1]}…"

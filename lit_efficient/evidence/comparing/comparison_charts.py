"""Pictures of a comparison as inline SVG: memory against step time with the frontier, and memory by kind as bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from lit_efficient.evidence.comparing.comparison import VariantResult
from lit_efficient.evidence.reporting.line_chart import COLOURS, RIGHT, WIDTH, Axis, Unit, frame, number, picture
from lit_efficient.evidence.reporting.markup import Markup, joined, tag
from lit_efficient.evidence.reporting.text_table import room_of

_TOP, _BOTTOM = 26, 276
_LETTER, _LINE = 6.2, 12  # width and height of a letter
_GAP = 3  # beside labels
_LONGEST = 24  # letters of a label
_REACHES = (8, 16, 27, 40, 56, 74)  # from a point to its label
_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.6), (-0.8, -0.6), (0.8, 0.6), (-0.8, 0.6))
_LOGARITHMIC, _LEAST = 5, 1e-9  # from which span on; ratio
_OTHER = "other"  # kinds of memory
Box = tuple[float, float, float, float]  # left, top, right, bottom


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one beats, that is, is as low in both and lower in one; from left to right."""
    found: list[int] = []
    for i in sorted(range(len(points)), key=points.__getitem__):
        if not found or points[i][1] < points[found[-1]][1] or points[i] == points[found[-1]]:
            found.append(i)
    return found


def scatter(variants: Sequence[VariantResult]) -> tuple[Markup, list[int], dict[int, str]]:
    """Memory against step time of the variants of which both are known, the baseline first; lower left is better.

    Returns:
        The picture, the places of the frontier's variants, and by place the labels: names, numbers from 1 for want of
        room.
    """
    points = [(each.time.value, each.peak_ratio) for each in variants]
    best = frontier(points)
    least, most = min(points)[0] / 2, max(points)[0] * 2
    bounds = [end for each in variants for end in (each.time.low, each.time.high) if least < end < most]
    y_axis = _axis([memory for _, memory in points], _BOTTOM, _TOP)
    x_axis = _axis([*bounds, *(time for time, _ in points)], y_axis.room(), RIGHT)
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
    whiskers = [_whisker(each, x_axis, y) for each, (_, y) in zip(variants, places, strict=True)]
    stairs = [(places[best[0]][0], float(_TOP)), places[best[0]]]
    for i, j in itertools.pairwise(best):
        stairs += [(places[j][0], places[i][1]), places[j]]
    stairs.append((float(RIGHT), stairs[-1][1]))
    lines = [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in itertools.pairwise(stairs)]
    order = [*best, *(i for i in range(len(points)) if i not in best)]
    area = x_axis.start, _TOP, RIGHT, _BOTTOM
    labels = _labels([each.name for each in variants], places, order, [*whiskers, *lines], area)
    names = ", ".join(variants[i].name for i in best)
    (x, y), edge = places[0], "L".join(f"{x:.1f} {y:.1f}" for x, y in stairs)
    drawn = [
        *frame(x_axis, y_axis),
        tag("text", "peak memory, baseline = 1", x=6, y=14),
        tag("text", "step time, baseline = 1", x=RIGHT, y=_BOTTOM + 34, text_anchor="end"),
        tag("path", d=f"M{x:.1f} {_TOP}V{_BOTTOM}M{area[0]} {y:.1f}H{RIGHT}", class_="rule dashed"),
        tag("path", d=f"M{edge}", class_="line0"),
        *(tag("path", d=f"M{a:.1f} {b:.1f}H{c:.1f}", class_="whisker") for a, b, c, _ in whiskers),
        *(label for label, _ in labels.values()),
    ]
    for i, (each, (x, y)) in enumerate(zip(variants, places, strict=True)):
        kind = "line1" if i == 0 else "line0" if i in best else "line7"
        words = f"{each.name}: step time {number(each.time.value)}, peak memory {number(each.peak_ratio)}"
        drawn.append(tag("path", tag("title", words), d=f"M{x:.1f} {y:.1f}h0", class_=f"{kind} dots"))
    words = f"{len(variants)} variants; lower left is better. The frontier, fastest first: {names}."
    drawing = picture("Peak memory against step time", *drawn, height=_BOTTOM + 44, words=words)
    return drawing, best, {i: text for i, (_, text) in sorted(labels.items())}


def bars(variants: Sequence[VariantResult], kinds: Sequence[str], unit: Unit) -> Markup:
    """Memory by kind, a bar for each variant whose peak is known, with a tick where a prediction is."""
    most = max(max(each.peak, sum(each.kinds.values()), each.planned or 0) for each in variants)
    scale = (WIDTH - 70) / most
    drawn: list[Markup] = []
    for row, each in enumerate(variants):
        top, x, all_kinds = 4 + 34 * row, 0.0, sum(each.kinds.values())
        others = all_kinds - sum(each.kinds.get(kind, 0) for kind in kinds)
        parts = [each.kinds.get(kind, others if kind == _OTHER else 0) for kind in kinds]
        drawn.append(tag("text", _cut(each.name, 60), x=0, y=top + 10))
        for i, (kind, part) in enumerate(zip((*kinds, "not known"), (*parts, each.peak - all_kinds))):
            if part > 0:
                words = tag("title", f"{each.name}: {kind} {unit.of(part)} {unit.name}")
                place = {"x": f"{x:.1f}", "y": top + 15, "width": f"{part * scale:.1f}", "height": 12}
                drawn.append(tag("rect", words, **place, class_=f"line{i}" if i < len(kinds) else "rest"))
                x += part * scale
        end = max(x, (each.planned or 0) * scale) + 6
        drawn.append(tag("text", f"{unit.of(each.peak)} {unit.name}", x=f"{end:.1f}", y=top + 25))
        if each.planned is not None:
            words = tag("title", f"{each.name}: planned {unit.of(each.planned)} {unit.name}")
            drawn.append(tag("path", words, d=f"M{each.planned * scale:.1f} {top + 12}v18", class_="tick"))
    peaks = "; ".join(f"{each.name}: {unit.of(each.peak)} {unit.name}" for each in variants)
    return picture("Memory at the peak by kind", *drawn, height=8 + 34 * len(variants), words=peaks)


def shown_kinds(all_kinds: Sequence[Mapping[str, int]]) -> list[str]:
    """The kinds that have a colour of their own, what takes most first; the last is for all others, if there are."""
    found = kinds_of(all_kinds)
    kept = [kind for kind in found if kind != _OTHER][: COLOURS - 1]
    return found if len(found) <= COLOURS else [*kept, _OTHER]


def kinds_of(all_kinds: Sequence[Mapping[str, int]]) -> list[str]:
    """The kinds of memory that some variants have, what takes most of any of them first."""
    most: dict[str, int] = {}
    for kinds in all_kinds:
        for kind, size in kinds.items():
            most[kind] = max(size, most.get(kind, 0))
    return sorted((kind for kind in most if most[kind]), key=lambda kind: -most[kind])


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis that has 1, where the baseline is, on it."""
    low, high = min(values), max(values)
    return Axis(low, high, start, end, log=_LEAST < low < high / _LOGARITHMIC, margin=0.06)


def _whisker(each: VariantResult, axis: Axis, y: float) -> Box:
    """An interval, as far as it is in the picture."""
    ends = [end if math.isfinite(end) else each.time.value for end in (each.time.low, each.time.high)]
    places = [axis.at(end) if end > 0 or not axis.log else axis.start for end in ends]
    left, right = (min(max(place, axis.start), axis.end) for place in places)
    return left, y, right, y


def _labels(
    names: Sequence[str], places: Sequence[tuple[float, float]], order: Sequence[int], lines: Sequence[Box], area: Box
) -> dict[int, tuple[Markup, str]]:
    """The labels that have room, each beside its point or led to it: its name, else its number from 1."""
    found: dict[int, tuple[Markup, str]] = {}
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for i in order:
        for text, also in ((_cut(names[i]), lines), (_cut(names[i]), ()), (str(i + 1), ())):
            width = _LETTER * (room_of(text) + 0.4 * sum(map(str.isupper, text)))
            room = next(_rooms(places[i], width, area, [*taken, *also], taken[len(places) :]), None)
            if room is None:
                continue
            x, y, anchor, box = room
            taken.append(box)
            label = tag("text", text, x=f"{x:.1f}", y=f"{y + 4:.1f}", text_anchor=anchor, class_="label")
            if math.dist((x, y), places[i]) > _REACHES[0] + 1:
                end = f"{places[i][0]:.1f} {places[i][1]:.1f}"
                label = joined(tag("path", d=f"M{x:.1f} {y:.1f}L{end}", class_="whisker"), label)
            found[i] = label, text
            break
    return found


def _rooms(
    place: tuple[float, float], width: float, area: Box, taken: Sequence[Box], labels: Sequence[Box]
) -> Iterator[tuple[float, float, str, Box]]:
    """Yield where a text beside a point overlaps nothing, and the way to it no label: x, middle, anchor and box."""
    for reach in _REACHES:
        for right, down in _DIRECTIONS:
            x, y = place[0] + reach * right, place[1] + reach * down
            left = x - (0 if right > 0 else width if right < 0 else width / 2)
            box = left, y - _LINE / 2, left + width, y + _LINE / 2
            inside = area[0] <= box[0] and area[1] <= box[1] and box[2] <= area[2] and box[3] <= area[3]
            way = [(place[0] + reach * right * k / 8, place[1] + reach * down * k / 8) for k in range(8)]
            crossed = any(a <= x <= c and b <= y <= d for a, b, c, d in labels for x, y in way)
            if inside and not crossed and not any(_overlap(box, other) for other in taken):
                yield x, y, "start" if right > 0 else "end" if right < 0 else "middle", box


def _overlap(a: Box, b: Box) -> bool:
    return a[0] - _GAP < b[2] and b[0] < a[2] + _GAP and a[1] < b[3] and b[1] < a[3]


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"

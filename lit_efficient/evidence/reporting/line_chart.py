"""A chart of lines as inline SVG: round ticks, a logarithmic axis where that helps, gaps where a value was not finite.

A line of any length is drawn by the lowest and the highest value of each pixel's width. Colours are those of the
page's classes ``line0`` to ``line7``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from lit_efficient.evidence.reporting.markup import Markup, grid, joined, tag

Point = tuple[float, float]
COLOURS = 8
WIDTH, RIGHT = 400, 388
_HEIGHT, _TOP, _BOTTOM = 220, 10, 196
_LEAST, _MOST = 1e-280, 1e300  # so that differences are finite, and their parts are not zero


def line_chart(
    title: str,
    lines: Sequence[tuple[int, Sequence[Point]]],
    *,
    from_zero: bool = False,
    along: str = "step",
    words: str = "",
) -> Markup:
    """The chart.

    Lines are the numbers of their colours and their points, by step (NaN is a value that was not finite), or by what is
    counted ``along``: ``second``. The vertical axis is logarithmic where all values are positive and span 1 to 30,
    unless it is to begin ``from_zero``. ``title`` and ``words`` are for those who cannot see it.
    """
    steps = [x for _, points in lines for x, _ in points]
    values = [y for _, points in lines for _, y in points if math.isfinite(y)] or [0.0, 1.0]
    low, high = min(values), max(values)
    logarithmic = not from_zero and _LEAST < low < high / 30
    y_axis = Axis(min(low, 0.0) if from_zero else low, high, _BOTTOM, _TOP, logarithmic, margin=0.04)
    x_axis = Axis(min(steps), max(steps), y_axis.room(), RIGHT)
    drawn = [_line(colour % COLOURS, points, x_axis, y_axis, along) for colour, points in lines]
    return picture(title, *frame(x_axis, y_axis, whole=along == "step"), *drawn, height=_HEIGHT, words=words)


def line_figure(
    title: str,
    note: str,
    lines: Sequence[tuple[int, str, Sequence[Point]]],
    from_zero: bool = False,
    along: str = "step",
) -> Markup:
    """The chart below its title, a note, and what each colour is, with its last value."""
    ends = [(i % COLOURS, name, number(points[0][1]), number(points[-1][1])) for i, name, points in lines]
    keys = (tag("span", f"{name} {last}", class_=f"key line{i}") for i, name, _, last in ends)
    words = ", ".join(f"{name}: {first} to {last}" for _, name, first, last in ends)
    paths = [(colour, points) for colour, _, points in lines]
    drawn = line_chart(title, paths, from_zero=from_zero, along=along, words=words)
    return tag("figure", tag("figcaption", title, tag("small", " ", note), grid("keys", *keys)), drawn)


def picture(title: str, *drawn: Markup, height: float, words: str = "") -> Markup:
    """What is drawn, as wide as a phone at least; with its title, and in words, for those who cannot see it."""
    words = tag("desc", words) if words else Markup()
    return tag("svg", words, *drawn, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=title)


def frame(x_axis: Axis, y_axis: Axis, *, whole: bool = False) -> Iterator[Markup]:
    """Yield the rules and labels of two axes; ``whole`` steps along the horizontal one are not broken up."""
    left, right, bottom = x_axis.start, x_axis.end, y_axis.start
    for place, label in y_axis.ticks():
        yield tag("path", d=f"M{left} {place:.1f}H{right}", class_="rule")
        yield tag("text", label, x=left - 6, y=f"{place + 4:.1f}", text_anchor="end")
    for place, label in x_axis.ticks(whole=whole):
        yield tag("path", d=f"M{place:.1f} {bottom}v4", class_="rule")
        yield tag("text", label, x=f"{min(place, right - 8):.1f}", y=bottom + 18, text_anchor="middle")


class Axis:
    """Places values between two ends of the picture, ``margin`` of the range away from them."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False, margin: float = 0) -> None:
        low, high = _tame(low), _tame(high)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # all alike
            pad = 0.1 * abs(high) or 1.0
            low, high, margin = low - pad, high + pad, 0
        low, high = (math.log10(low), math.log10(high)) if log else (low, high)
        self.log, self.start, self.end = log, start, end
        self.low, self.high = low - margin * (high - low), high + margin * (high - low)

    def at(self, value: float) -> float:
        """The place of a value."""
        share = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def room(self) -> float:
        """What the labels of a vertical axis need on its left."""
        return 12 + 6.5 * max(len(label) for _, label in self.ticks())

    def ticks(self, whole: bool = False) -> Iterator[tuple[float, str]]:
        """Yield places of round values, 1, 2 and 5 times powers of ten, and their labels."""
        if self.log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            span = self.high - self.low
            factors = (1, 2, 5) if span < 2 else (1, 3) if span < 3 else (1,)
            for decade, factor in itertools.product(decades[:: -(-len(decades) // 8)], factors):
                if self.low <= math.log10(factor) + decade <= self.high:
                    yield self.at(factor * 10.0**decade), number(factor * 10.0**decade, 10.0**decade)
            return
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        step = max(step, 1.0) if whole else step
        for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield self.at(i * step), number(i * step, step, max(abs(self.low), abs(self.high)))


def _tame(value: float) -> float:
    return max(-_MOST, min(value, _MOST)) if abs(value) >= _LEAST else 0.0


def number(value: float, step: float | None = None, beside: float = 0.0) -> str:
    """A number for people: 12.5k, 1.5M, 3e-4.

    Args:
        value: The number.
        step: Write as many digits as multiples of this need, zeros, too; without it four, and no zeros at the end.
        beside: Write it like this number, if that is larger.

    Example:
        >>> number(12500.0), number(0.00031), number(2.0, 0.5), number(500.0, 500.0, 15000.0), number(float("nan"))
        ('12.5k', '3.1e-4', '2.0', '0.5k', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    if abs(value) < 1e-300:
        return "0"
    size = math.floor(math.log10(max(abs(value), abs(beside))) + 1e-9)
    unit = 3 * (size // 3) if 4 <= size < 12 else 0 if -4 < size < 4 else size
    finest = size - 3 if step is None else max(size - 6, math.floor(math.log10(step) + 1e-9))
    text = f"{value / 10.0**unit:z.{max(0, unit - finest)}f}"
    text = text.rstrip("0").rstrip(".") if step is None and "." in text else text
    return text + ({0: "", 3: "k", 6: "M", 9: "G"}[unit] if 0 <= unit < 12 else f"e{unit}")


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


def thinned(points: Sequence[Point], low: float, high: float, pixels: int) -> list[Point]:
    """Of the points that share a pixel's width the lowest, the highest and one that is not finite, in their order."""
    if len(points) <= 2 * pixels:
        return list(points)
    kept: list[Point] = []
    for _, group in itertools.groupby(points, lambda point: int((point[0] - low) / (high - low) * pixels)):
        mine = list(group)
        finite = sorted((y, i) for i, (_, y) in enumerate(mine) if math.isfinite(y))
        gaps = [i for i, (_, y) in enumerate(mine) if not math.isfinite(y)]
        kept += [mine[i] for i in sorted({*(i for _, i in finite[:1] + finite[-1:]), *gaps[:1]})]
    return kept


def _line(colour: int, points: Sequence[Point], x_axis: Axis, y_axis: Axis, along: str) -> Markup:
    path, dots, pen, bad = "", "", "M", None
    for x, y in thinned(points, x_axis.low, x_axis.high, RIGHT):
        if math.isfinite(y):
            place = f"{x_axis.at(x):.1f} {y_axis.at(_tame(y)):.1f}"
            path += f"{pen}{place}" + ("h0" if pen == "M" else "")  # a point, should no other follow
            dots += f"M{place}h0"
            pen = "L"
        else:
            pen, bad = "M", x if bad is None else bad
    drawn = tag("path", d=path, class_=f"line{colour}")
    if len(points) <= 20:
        drawn = joined(drawn, tag("path", d=dots, class_=f"line{colour} dots"))
    if bad is None:
        return drawn
    place = f"{x_axis.at(bad):.1f}"
    return joined(
        drawn, tag("path", tag("title", f"not finite at {along} {bad:g}"), d=f"M{place} {_TOP}V{_BOTTOM}", class_="bad")
    )

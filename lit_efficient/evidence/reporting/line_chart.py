"""Line charts as inline SVG: round ticks, a logarithmic axis where it helps, gaps where a value is not finite.

A long line is reduced to the lowest and the highest value of each pixel column. The colours are the classes ``line0``
to ``line7`` of the page's style sheet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lit_efficient.evidence.reporting.pages import rendered

Point = tuple[float, float]  # x and y
COLOURS = 8
# Width of a picture, and the right end of its plot area.
WIDTH = 400
RIGHT = 388
_HEIGHT = 234
_TOP = 10
_BOTTOM = 196
# Values are clipped to these sizes, so that differences between them are finite and fractions of them are not zero.
_LEAST = 1e-280
_MOST = 1e300
_LOGARITHMIC = 30  # ratio of the highest to the lowest value above which a chart is logarithmic
_LABEL = 14  # room for the name of the vertical axis
_LONGEST = 34  # characters of that name
_WITH_DOTS = 20  # most points of a line whose points are marked


@dataclass(frozen=True)
class Line:
    """A named line of a chart. ``points`` are (x, y); a y of NaN or infinity is drawn as a gap."""

    colour: int
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class _Curve:
    """A line as paths of SVG."""

    colour: int
    path: str
    dots: str  # a mark for each point; empty for long lines
    gap: float | None  # the first x whose y is not finite


def line_chart(title: str, lines: Sequence[Line], *, from_zero: bool = False, along: str = "step") -> Markup:
    """Return a chart of lines as an SVG element.

    The vertical axis is logarithmic if all values are positive and their ratio exceeds 30.

    Args:
        title: Name of the chart for screen readers, and of the vertical axis.
        lines: At least one line with at least one point.
        from_zero: Start the vertical axis at zero and keep it linear.
        along: Quantity of the horizontal axis. Ticks of ``step`` are whole numbers.
    """
    steps = [x for line in lines for x, _ in line.points]
    values = [y for line in lines for _, y in line.points if math.isfinite(y)] or [0.0, 1.0]
    low = min(values)
    high = max(values)
    # A logarithmic axis needs positive values, and helps only if they differ much.
    logarithmic = not from_zero and _LEAST < low < high / _LOGARITHMIC
    if from_zero:
        low = min(low, 0.0)
    y_axis = Axis(low, high, _BOTTOM, _TOP, logarithmic, margin=0.04)
    x_axis = Axis(min(steps), max(steps), y_axis.room() + _LABEL, RIGHT)
    ends = [f"{line.name}: {number(line.points[0][1])} to {number(line.points[-1][1])}" for line in lines if line.name]
    return rendered(
        "line_chart.svg",
        title=title,
        words=", ".join(ends),
        width=WIDTH,
        height=_HEIGHT,
        x_axis=x_axis,
        y_axis=y_axis,
        along=along,
        name=title if len(title) <= _LONGEST else f"{title[: _LONGEST - 1]}…",
        curves=[_curve(line, x_axis, y_axis) for line in lines],
    )


def line_figure(
    title: str, note: str, lines: Sequence[Line], *, from_zero: bool = False, along: str = "step"
) -> Markup:
    """Return a chart below its title, a note, and a legend with the last value of each line."""
    chart = line_chart(title, lines, from_zero=from_zero, along=along)
    return rendered("line_figure.html", title=title, note=note, lines=lines, chart=chart, number=number)


class Axis:
    """Map from values to places between ``start`` and ``end`` of a picture.

    ``margin`` is the distance of the lowest and the highest value from the ends, as a share of their range.
    """

    def __init__(
        self, low: float, high: float, start: float, end: float, log: bool = False, margin: float = 0.0
    ) -> None:
        low = _clipped(low)
        high = _clipped(high)
        # A range of zero has no scale.
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # all values are alike
            padding = 0.1 * abs(high) or 1.0
            low -= padding
            high += padding
            margin = 0.0
        if log:
            low = math.log10(low)
            high = math.log10(high)
        padding = margin * (high - low)
        self.log = log
        self.start = start
        self.end = end
        self.low = low - padding
        self.high = high + padding

    def at(self, value: float) -> float:
        """Return the place of a value."""
        if self.log:
            value = math.log10(value)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def room(self) -> float:
        """Return the width that the labels of a vertical axis need."""
        return 12 + 6.5 * max(len(label) for _, label in self.ticks())

    def ticks(self, whole: bool = False) -> Iterator[tuple[float, str]]:
        """Yield the places and labels of round values; ``whole`` yields whole numbers only."""
        if self.log:
            yield from self._decades()
            return
        # Ticks are multiples of 1, 2 or 5 times a power of ten, about five of them.
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        if whole:
            step = max(step, 1.0)
        largest = max(abs(self.low), abs(self.high))
        # The tolerance keeps a tick at the end of the axis that rounding puts just outside of it.
        for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield self.at(i * step), number(i * step, step, largest)

    def _decades(self) -> Iterator[tuple[float, str]]:
        span = self.high - self.low
        factors: tuple[int, ...] = (1,)
        if span < 2:
            factors = (1, 2, 5)
        elif span < 3:
            factors = (1, 3)
        # At most eight decades have ticks, and few decades have ticks in between.
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        every = math.ceil(len(decades) / 8)
        for decade, factor in itertools.product(decades[::every], factors):
            if self.low <= math.log10(factor) + decade <= self.high:
                power = 10.0**decade
                yield self.at(factor * power), number(factor * power, power)


def _clipped(value: float) -> float:
    if abs(value) < _LEAST:
        return 0.0
    return max(-_MOST, min(value, _MOST))


def number(value: float, step: float | None = None, reference: float = 0.0) -> str:
    """Return a number in a short form: 12.5k, 1.5M, 3e-4.

    Args:
        value: The number.
        step: Show the digits that multiples of ``step`` need, with trailing zeros. ``None`` shows four significant
            digits without trailing zeros.
        reference: Use the unit of this number if it is larger than ``value``.

    Example:
        >>> number(12500.0), number(0.00031), number(2.0, 0.5), number(500.0, 500.0, 15000.0), number(float("nan"))
        ('12.5k', '3.1e-4', '2.0', '0.5k', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    if abs(value) < 1e-300:
        return "0"
    # The tolerance keeps powers of ten from being rounded down.
    size = math.floor(math.log10(max(abs(value), abs(reference))) + 1e-9)
    exponent = size
    unit = f"e{size}"
    if -4 < size < 12:
        exponent = 0
        if size >= 4:
            exponent = 3 * (size // 3)
        unit = ("", "k", "M", "G")[exponent // 3]
    finest = size - 3
    if step is not None:
        finest = max(size - 6, math.floor(math.log10(step) + 1e-9))
    text = f"{value / 10.0**exponent:z.{max(0, exponent - finest)}f}"
    if step is None and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text + unit


class Unit:
    """A common unit and number of digits for several sizes in bytes, so that the sizes can be compared.

    Example:
        >>> Unit([1_590_000_000, 12_000_000]).of(12_000_000), Unit([3000]).name
        ('0.011', 'KiB')
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        largest = max([*sizes, 1])
        power = min(int(math.log2(largest) // 10), 3)
        self.bytes = 1024.0**power
        self.name = ("B", "KiB", "MiB", "GiB")[power]
        self.digits = 0
        if power:
            self.digits = max(0, 3 - int(math.log10(largest / self.bytes)))

    def of(self, size: float) -> str:
        """Return a size in this unit, without the name of the unit."""
        return f"{size / self.bytes:,.{self.digits}f}"


def thinned(points: Sequence[Point], low: float, high: float, pixels: int) -> list[Point]:
    """Return at most three points of each pixel column: the lowest, the highest, and the first that is not finite.

    ``points`` are in order of x, which lies between ``low`` and ``high``. Few points are returned as they are.
    """
    if len(points) <= 2 * pixels:
        return list(points)
    kept: list[Point] = []
    # The extremes of a column keep spikes visible.
    for _, column in itertools.groupby(points, lambda point: int((point[0] - low) / (high - low) * pixels)):
        mine = list(column)
        finite = sorted([point for point in mine if math.isfinite(point[1])], key=_y)
        gaps = [point for point in mine if not math.isfinite(point[1])]
        kept += sorted({*finite[:1], *finite[-1:], *gaps[:1]})
    return kept


def _y(point: Point) -> float:
    return point[1]


def _curve(line: Line, x_axis: Axis, y_axis: Axis) -> _Curve:
    path = ""
    dots = ""
    gap = None
    begins = True  # whether the next point begins a piece of the line
    for x, y in thinned(line.points, x_axis.low, x_axis.high, RIGHT):
        if not math.isfinite(y):
            begins = True
            if gap is None:
                gap = x
            continue
        place = f"{x_axis.at(x):.1f} {y_axis.at(_clipped(y)):.1f}"
        if begins:
            path += f"M{place}h0"  # a piece of one point is visible only with a line of length zero
        else:
            path += f"L{place}"
        dots += f"M{place}h0"
        begins = False
    if len(line.points) > _WITH_DOTS:
        dots = ""
    return _Curve(line.colour, path, dots, gap)

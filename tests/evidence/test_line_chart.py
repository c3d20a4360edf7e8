"""Tests of charts: ticks are round and apart, long lines are thinned, lines have gaps."""

from __future__ import annotations

import itertools
import math
import random
import re
from xml.etree import ElementTree

import pytest

from lit_efficient.evidence.reporting.line_chart import Line, number, thinned
from lit_efficient.evidence.reporting.line_chart import line_chart as chart_of_lines

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
HOSTILE = [
    [0.0, 1.0],
    [5.0, 5.0],
    [0.0, 0.0],
    [-3.0, 7.0],
    [1.0, 1.0 + 1e-12],
    [1e-9, 3e-9],
    [1e-5, 1e5],
    [0.2, 9.0],
    [3e-4, 2.9e-4],
    [999.0, 1001.0],
    [9990.0, 10010.0],
    [123456.0, 123457.0],
    [0.0, 12500.0],
    [0.0, 2.5e12],
    [-1e308, 1e308],
    [1e-300, 1e300],
    [5e-324, 1.0],
    [0.0, 5e-324],
    [5e-324, 5e-324],
    [2e-280, 2e-280],
    [3e-280, 7e-279],
    [1e305, 1e306],
    [math.nan, 1.0],
    [math.nan, math.inf],
]


def line_chart(title: str, lines: list, **options: bool) -> str:
    return chart_of_lines(title, [Line(colour, "", points) for colour, points in lines], **options)


def parsed(text: str) -> float:
    mantissa, unit = re.fullmatch(r"(-?[\d.]+(?:e-?\d+)?)([kMG]?)", text).groups()
    return float(mantissa) * UNITS[unit]


def texts(svg: str, anchor: str) -> list[tuple[float, float, str]]:
    found = [text for text in ElementTree.fromstring(svg).iter("text") if text.get("class") != "name"]  # of an axis
    return [(float(t.get("x")), float(t.get("y")), t.text) for t in found if t.get("text-anchor") == anchor]


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """Return the pieces of the line as points."""
    (path,) = [p.get("d") for p in ElementTree.fromstring(svg).iter("path") if p.get("class") == "line0"]
    pieces = [piece.replace("h0", "").split("L") for piece in path.split("M")[1:]]
    return [[tuple(map(float, point.split())) for point in piece] for piece in pieces]


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("values", HOSTILE, ids=str)
def test_ticks_are_apart_and_say_where_they_are(values: list[float], from_zero: bool) -> None:
    svg = line_chart("loss", [(0, list(enumerate(values)))], from_zero=from_zero)
    ticks = texts(svg, "end")
    assert 2 <= len(ticks) <= 14
    places = [y for _, y, _ in ticks]
    assert min(abs(a - b) for a, b in itertools.pairwise(places)) > 10  # pixels, of a font of 11
    labels = [label for _, _, label in ticks]
    assert len(set(labels)) == len(labels)
    assert min(x - 6.2 * len(label) for x, _, label in ticks) > 14  # within the picture, beside the axis's name
    told = [parsed(label) for label in labels]
    linear = [(a - b) / (c - d) for a, b, c, d in zip(told, told[1:], places, places[1:])]
    ratio = [math.log(a / b) / (c - d) for a, b, c, d in zip(told, told[1:], places, places[1:]) if b and a / b > 0]
    assert linear == pytest.approx([linear[0]] * len(linear), rel=0.02) or ratio == pytest.approx(
        [ratio[0]] * len(ratio), rel=0.03
    )
    for piece in drawn(svg):
        assert all(0 <= x <= 400 and 0 <= y <= 220 for x, y in piece)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (7, 7), (0, 3), (10, 1000), (0, 99_999), (5_000_000, 5_000_700), (0, 10**9)]
)
def test_steps_are_whole_and_apart(low: int, high: int) -> None:
    labels = texts(line_chart("loss", [(0, [(low, 1.0), (high, 2.0)])]), "middle")
    assert labels
    for (a, _, first), (b, _, second) in itertools.pairwise(labels):
        assert b - a > 3.2 * (len(first) + len(second)) + 4
        assert parsed(second) > parsed(first)
    assert all(parsed(label) == int(parsed(label)) for _, _, label in labels)


def test_a_long_line_keeps_its_extremes_and_its_order() -> None:
    draw = random.Random(0)
    points = [(step, draw.gauss(0.0, 1.0)) for step in range(100_000)]
    points[54_321] = (54_321, 50.0)
    points[77_777] = (77_777, -50.0)
    kept = thinned(points, 0, 99_999, 342)
    assert len(kept) <= 2 * 343
    assert {(54_321, 50.0), (77_777, -50.0)} <= set(kept)
    assert kept == sorted(kept)
    (line,) = drawn(line_chart("loss", [(0, points)]))
    tops = sorted(line, key=lambda point: point[1])
    left, right = line[0][0], line[-1][0]
    assert tops[0][0] == pytest.approx(left + (right - left) * 0.54321, abs=1.0)
    assert tops[-1][0] == pytest.approx(left + (right - left) * 0.77777, abs=1.0)
    assert thinned(points[:300], 0, 300, 342) == points[:300]


def test_a_line_breaks_where_it_was_not_finite() -> None:
    points = [(0, 1.0), (1, math.nan), (2, 3.0), (3, 2.0), (4, math.inf)]
    svg = line_chart("loss", [(0, points)])
    assert [len(piece) for piece in drawn(svg)] == [1, 2]
    assert "not finite at step 1" in svg
    long = [(step, math.nan if step == 50_000 else 1.0 + step) for step in range(100_000)]
    assert len(drawn(line_chart("loss", [(0, long)]))) == 2


def test_a_logarithmic_axis_where_it_helps() -> None:
    def middle(values: list[float], **options: bool) -> float:
        return drawn(line_chart("loss", [(0, list(enumerate(values)))], **options))[0][1][1]

    assert middle([1.0, 10.0, 100.0]) == pytest.approx(103, abs=1)  # halfway between 10 and 196
    assert middle([1.0, 10.0, 100.0], from_zero=True) > 170
    assert middle([0.0, 10.0, 100.0]) > 170
    assert middle([10.0, 15.5, 21.0]) == pytest.approx(103, abs=1)


@pytest.mark.parametrize("value", [0.71, 12_060.0, -3e-7, 1.0, 99_999.0, 123_456_789.0, 5e15, 0.0001])
def test_a_number_is_read_as_what_it_is(value: float) -> None:
    assert parsed(number(value)) == pytest.approx(value, rel=5e-4)

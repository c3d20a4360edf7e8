"""Tests of the report of a comparison in four formats, with any names of variants."""

from __future__ import annotations

import csv
import dataclasses
import html as entities
import io
import itertools
import json
import math
import random
import re
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lit_efficient.evidence.comparing.comparison import Comparison, VariantResult
from lit_efficient.evidence.comparing.comparison_charts import bars, frontier, scatter, shown_kinds
from lit_efficient.evidence.comparing.comparison_page import html, log_to_wandb, write_report
from lit_efficient.evidence.comparing.comparison_tables import (
    csv_text,
    markdown,
    one_line,
    said,
    tables,
    terminal_table,
)
from lit_efficient.evidence.comparing.estimates import UNKNOWN, Estimate
from lit_efficient.evidence.reporting.line_chart import Unit
from tests.html_page import Page, alone

HOSTILE = [
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>",
    "</svg></style></title>--><svg onload=alert(1)>",
    "a|b\\|c`d`*e*_f_[g](javascript:alert(1))~~h~~ $x$",
    "=HYPERLINK(\"http://x.example\";'y')",
    "+1-1|cmd",
    "@SUM(A1)",
    "-2+3",
    "\ttab\r\nnew line\n\n# heading",
    "\x1b[31mred\x1b[0m\x00\u202egnirts",
    "模型" * 30,
    "e\u0301" * 40,
    "x" * 300,
    "&lt;&amp;",
    "\ud800",
]


def estimate(value: float, share: float = 0.02, p: float | None = 0.01) -> Estimate:
    return Estimate(value, value - abs(share * value), value + abs(share * value), p, 5)


def variant(
    name: str, time: float, memory: float, p: float | None = 0.01, unit: str = "tokens", **changes: Any
) -> VariantResult:
    peak = int(6e8 * memory)
    values = {
        "failed": "",
        "time": estimate(time, p=p),
        "rate": estimate(12_345 / time, p=None),
        "unit": unit,
        "peak": peak,
        "peak_ratio": memory,
        "kinds": {"weights": peak // 2, "activations": peak // 3},
        "planned": int(peak * 1.01),
        "checkpoint_bytes": 41_000_000,
        "trainable": 124_000,
        "final_loss": 1.5,
        "loss": estimate(-0.021, p=p),
        "loss_at_time": estimate(0.03, p=p),
        "steps_to_loss": estimate(0.9, p=p),
        "time_to_loss": None,
        "forgetting": None,
        "curve": [(step, step * time / 10 + 0.1, 4 / (1 + step / 50)) for step in range(0, 101, 10)],
        "seeds": 3,
        "rounds": 5,
    }
    return VariantResult(name=name, **(values | changes))


def failed(name: str, reason: str) -> VariantResult:
    return VariantResult(name, failed=reason)


def compared(*variants: VariantResult, **changes: Any) -> Comparison:
    about = {"versions": {"torch": "2.13.0"}, "machine": "2 cores", "seeds": 3}
    baseline = variant("as it is", 1.0, 1.0, p=None)
    values = {"command": "python -m lit_efficient compare -c x", "about": about, "metric": "val/loss"}
    return Comparison(**(values | changes), variants=[baseline, *variants])


def rows_of(text: str) -> list[list[list[str]]]:
    """Return the cells of the tables in Markdown, as they are shown."""
    parts = [part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    cells = [[re.split(r"(?<!\\) \| ", line[2:-2]) for line in part] for part in parts]
    return [[[entities.unescape(re.sub(r"\\([^a-z\s])", r"\1", c)) for c in row] for row in part] for part in cells]


def room(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def hostile() -> Comparison:
    variants = [
        variant(name, 0.9 + i / 50, 1.1 - i / 50, kinds={name: 5000}, unit=name) for i, name in enumerate(HOSTILE)
    ]
    reasons = [failed(f"broken {i}", name) for i, name in enumerate(HOSTILE)]
    text = "".join(HOSTILE)
    about = {text: text, "more": {text: text}, "left_out": {text: text}}
    return compared(*variants, *reasons, command=text, metric=text, about=about)


def test_a_page_stays_a_page_whatever_names_say() -> None:
    found = Page(html(hostile()))
    alone(found)
    told = " ".join(found.text.split())
    for name in HOSTILE:
        assert one_line(name) in told
    assert "\x1b" not in found.source
    assert "\u202e" not in found.source


def test_markdown_stays_markdown() -> None:
    comparison = hostile()
    text = markdown(comparison)
    found = rows_of(text)
    assert len(found) == 6
    for part in found:
        assert {len(row) for row in part} == {len(part[0])}
    names = ["as it is", *map(one_line, HOSTILE)]
    for part in found[:3]:
        assert [row[0] for row in part[2:]] == names
    assert [row[1] for row in found[3][2:]] == names[1:]
    assert found[4][2:] == [[one_line("".join(HOSTILE))] * 2]
    fence = re.match(r"# Comparison\n\n(`{4,})bash\n", text)[1]
    outside = "".join(text.split(fence)[::2])
    assert not re.search(r"<\w|(?<!\\)\[(?![-\d.e, ]+\])", outside)
    assert {line[:2] for line in outside.splitlines() if line} <= {"# ", "##", "| ", "In", "Le", "14"}


def test_csv_holds_each_number_as_it_was_measured_and_no_formula() -> None:
    comparison = hostile()
    comparison.variants.append(variant("odd", 1 / 3, math.pi, loss=Estimate(-1e-300, -math.inf, 5e300, 0.1 + 0.2, 7)))
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison), newline="")))
    assert len(rows) == len(comparison.variants)
    for row, each in zip(rows, comparison.variants, strict=True):
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if isinstance(value, Estimate):
                got = [row[field.name], *(row[f"{field.name}_{part}"] for part in ("low", "high", "p", "n"))]
                numbers = [float(cell) if cell else None for cell in got]
                wanted = list(dataclasses.astuple(value))
                assert repr(numbers) == repr([part if part is None else float(part) for part in wanted])
            elif isinstance(value, int | float):
                assert repr(float(row[field.name])) == repr(float(value))
        assert row["kinds.weights"] == (str(each.kinds["weights"]) if "weights" in each.kinds else "")
        assert row["forgetting"] == row["forgetting_low"] == ""
    for cell in (*rows[0], *(row[head] for row in rows for head in ("name", "failed", "unit"))):
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    names = [row["name"].removeprefix("'") for row in rows]
    assert names[1 : 1 + 7] == HOSTILE[:7]


@pytest.mark.parametrize("width", [20, 33, 80, 119, 400])
def test_a_terminal_shows_all_within_its_width(width: int) -> None:
    comparison = hostile()
    text = terminal_table(comparison, width)
    assert max(map(room, text.splitlines())) <= width
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    letters = re.sub(r"\s", "", text)
    assert width < 33 or all(f"broken{i}" in letters for i in range(len(HOSTILE)))
    plain = compared(variant("lora", 0.9, 0.5), failed("muon", "OutOfMemoryError: at step 3"))
    lines = [line.split() for line in terminal_table(plain, max(width, 60)).splitlines()]
    assert ["muon", "failed:", "OutOfMemoryError:", "at", "step", "3"] in lines
    assert next(line for line in lines if line[:1] == ["lora"])[:4] == ["lora", "0.900", "[0.882,", "0.918]"]


def test_planned_stands_beside_the_peak() -> None:
    comparison = compared(variant("lora", 0.9, 0.5, planned=303_000_000), variant("ema", 1.1, 1.2, planned=None))
    columns = next(iter(tables(comparison).values()))
    assert columns["peak memory, MiB"] == ["572.2 (1.00)", "286.1 (0.500)", "686.6 (1.20)"]
    assert columns["planned, MiB"][1:] == ["289.0 (+1.0\N{NO-BREAK SPACE}%)", "-"]


@pytest.mark.parametrize("p", [0.0, 0.05, 0.0500001, 0.5, 1.0, None, math.nan])
def test_no_evidence_is_said_exactly_where_p_is_above_5_percent(p: float | None) -> None:
    comparison = compared(variant("lora", 0.9, 0.5, p=p), variant("ema", 1.1, 1.2, p=0.04, forgetting=estimate(3, p=p)))
    lacking = p is not None and p > 0.05
    made = [markdown(comparison), terminal_table(comparison, 400), Page(html(comparison)).text]
    texts = [" ".join(text.split()) for text in made]
    # time, loss, loss at equal time, steps to equal loss; forgetting
    assert [text.count(", no evidence") for text in texts] == [5 * lacking] * 3
    untested = p is None or math.isnan(p)
    assert [text.count(", not tested") for text in texts] == [5 * untested] * 3
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert rows[1]["time_p"] == ("" if p is None else repr(p))


def test_what_an_interval_excludes_its_digits_exclude() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        null, half = draw.choice((0, 1)), 10 ** draw.uniform(-4, 1)
        value = null + draw.choice((-1, 1)) * half * draw.uniform(0, 3)
        if abs(abs(value - null) - half) < 0.002 * half:
            continue  # an end that is no difference but for a thousandth of the interval is shown as that
        text = said(Estimate(value, value - half, value + half, 0.01, 5), null)
        low, high = (float(end) for end in re.search(r"\[(\S+),\s(\S+)\]", text).groups())
        assert (low <= null <= high) == (value - half <= null <= value + half), text
        assert low == pytest.approx(value - half, abs=0.2 * half)
        assert float(text.split(" [")[0]) == pytest.approx(value, abs=0.2 * half)


def test_the_frontier_is_what_no_other_beats() -> None:
    draw = random.Random(0)
    for count in [*range(1, 40)] * 5:
        points = [(draw.choice((draw.random(), 0.5)), draw.choice((draw.random(), 0.5))) for _ in range(count)]
        best = {
            i
            for i, (x, y) in enumerate(points)
            if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
        }  # fmt: skip
        found = frontier(points)
        assert set(found) == best
        assert [points[i] for i in found] == sorted(points[i] for i in best)


def boxes(svg: ElementTree.Element) -> dict[str, tuple[float, float, float, float]]:
    """Return the box of each label, if each letter is as wide as an ``n``."""
    found = {}
    for text in svg.iter("text"):
        if text.get("class") == "label":
            x, y, width = float(text.get("x")), float(text.get("y")), 6 * len(text.text)
            x -= {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
            found[text.text] = x, y - 9, x + width, y + 2
    return found


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.2])
@pytest.mark.parametrize("count", [1, 2, 8, 30])
def test_labels_are_in_the_picture_and_apart(count: int, spread: float) -> None:
    draw = random.Random(count)
    spots = [dataclasses.replace(variant("as it is", 1.0, 1.0), time=Estimate(1.0, math.nan, math.nan, None, 1))]
    for i in range(1, count):
        time, half = math.exp(draw.gauss(0, spread)), draw.choice((0.01, 3.0))
        wide = Estimate(time, time - half, time + half, 0.5, 3)
        one = variant(f"all but number {i}", time, math.exp(draw.gauss(0, spread)))
        spots.append(dataclasses.replace(one, time=wide))
    points = [(spot.time.value, spot.peak_ratio) for spot in spots]
    drawn, best, labels = scatter(spots)
    assert best == frontier(points)
    svg = ElementTree.fromstring(drawn)
    found = boxes(svg)
    assert list(found)
    assert set(found) == set(labels.values())
    assert all(text in (spots[i].name, str(i + 1)) for i, text in labels.items())
    assert count > 8 or sorted(labels.values()) == sorted(spot.name for spot in spots)
    for left, top, right, bottom in found.values():
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 320
    for a, b in itertools.combinations(found.values(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    dots = [path for path in svg.iter("path") if path.get("class", "").endswith("dots")]
    places = [tuple(map(float, re.fullmatch(r"M(\S+) (\S+)h0", dot.get("d")).groups())) for dot in dots]
    assert all(0 < x < 400 and 20 < y < 280 for x, y in places)
    by_time = sorted(range(count), key=lambda i: points[i][0])
    assert [places[i][0] for i in by_time] == sorted(x for x, _ in places)
    by_memory = sorted(range(count), key=lambda i: -points[i][1])
    assert [places[i][1] for i in by_memory] == sorted(y for _, y in places)
    blue = {i for i, dot in enumerate(dots) if dot.get("class") == "line0 dots"}
    assert blue == set(best) - {0}
    ends = re.findall(r"M(\S+) (\S+)H(\S+)\"", drawn)
    assert all(0 <= float(x) <= 400.1 for a, _, b in ends for x in (a, b))


def test_bars_are_as_long_as_bytes_are_many() -> None:
    kinds = {f"kind {i}": 100 - i for i in range(12)}
    one = variant("one", 1.0, 1.0, peak=2000, kinds={"weights": 500, "gradients": 1000}, planned=1900)
    two = variant("two", 1.0, 1.0, peak=sum(kinds.values()), kinds=kinds, planned=None)
    svg = ElementTree.fromstring(bars([one, two], shown_kinds([one, two]), Unit([2000])))
    parts: dict[str, list[ElementTree.Element]] = {"one": [], "two": []}
    for rect in svg.iter("rect"):
        parts[rect.find("title").text.partition(":")[0]].append(rect)
    total = {name: sum(float(rect.get("width")) for rect in found) for name, found in parts.items()}
    (tick,) = [path.get("d") for path in svg.iter("path") if path.get("class") == "tick"]
    assert float(tick.split()[0][1:]) == pytest.approx(total["one"] * 1900 / 2000, abs=0.2)
    assert total["two"] == pytest.approx(total["one"] * sum(kinds.values()) / 2000, abs=1)
    assert [rect.find("title").text for rect in parts["one"]] == [
        "one: gradients 0.977 KiB", "one: weights 0.488 KiB", "one: not known 0.488 KiB"
    ]  # fmt: skip
    assert len(parts["two"]) == 6  # of eight colours two are the other one's, and the last is for all others
    assert all(float(rect.get("x")) + float(rect.get("width")) < 400 for rect in svg.iter("rect"))
    colours = [{rect.get("class") for rect in found} for found in parts.values()]
    assert not (colours[0] & colours[1])


def test_what_is_missing_is_no_error() -> None:
    bare = variant("bare", 0.9, 0.5, kinds={}, planned=None, curve=[], loss=UNKNOWN, steps_to_loss=None)
    unseen = variant("compiled", 0.7, 1.0, peak=0, peak_ratio=math.nan)
    odd = Estimate(5e-324, -math.inf, math.inf, 0.5, 2)
    extreme = dataclasses.replace(bare, time=odd, loss=odd, peak_ratio=1e300, curve=[(1, math.inf, math.nan)])
    cases = [
        compared(),
        compared(bare, unseen),
        compared(extreme),
        compared(failed("a", "no"), failed("b", "no")),
        compared(bare),
    ]
    for comparison in cases[3:]:
        comparison.variants[0] = failed("as it is", "no")
    for comparison in cases:
        alone(Page(html(comparison)))
        names = [each.name for each in comparison.variants]
        assert all(name in text for name in names for text in (markdown(comparison), terminal_table(comparison)))
        assert len(csv_text(comparison).splitlines()) == 1 + len(names)


def test_curves_are_drawn_by_steps_and_by_time() -> None:
    many = [variant(f"v{i}", 1.0 + i, 0.5) for i in range(9)]
    found = Page(html(compared(*many, variant("no curve", 1.0, 0.5, curve=[]))))
    captions = re.findall(r"<figcaption>val/loss<small> by (\w+)</small>", found.source)
    assert captions == ["step", "second"] * 2
    assert "v0: 4 to 1.333" in found.text
    keys = re.findall(r'class="key line(\d)">(as it is|v\d) ', found.source)
    whole = [("0", "as it is"), *((str(i + 1), f"v{i}") for i in range(7))]
    assert keys == 2 * whole + 2 * [("0", "as it is"), ("1", "v7"), ("2", "v8")]


def test_files_hold_what_the_functions_say(tmp_path: Path) -> None:
    comparison = hostile()
    for _ in range(2):
        files = write_report(comparison, tmp_path / "new" / "folder")
    assert sorted(files) == sorted((tmp_path / "new" / "folder").iterdir())
    texts = {path.suffix: path.read_bytes().decode() for path in files}
    assert texts == {".html": html(comparison), ".md": markdown(comparison), ".csv": csv_text(comparison)}


def unblocked(data: bytes) -> bytes:
    """Return the content of a W&B file, which consists of blocks of 32 KiB with 7 bytes before each piece."""
    found, at = b"", 7  # behind the file's own head
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        if left < 7 or not data[at + 6]:  # the rest of a block is filling
            at += left
            continue
        found += data[at + 7 : at + 7 + size]
        at += 7 + size
    return found


def test_wandb_has_the_table_the_page_and_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    monkeypatch.chdir(tmp_path)
    comparison = compared(variant("<b>lora", 0.9, 0.5), failed("muon", "no"))
    files = write_report(comparison, tmp_path)
    logger = WandbLogger(save_dir=str(tmp_path), offline=True)
    try:
        log_to_wandb(comparison, files, [CSVLogger(str(tmp_path)), logger])
        figures = dict(logger.experiment.summary)
        folder = Path(logger.experiment.dir)
    finally:
        wandb.finish()
        wandb.teardown()  # its service stays in this folder, where later runs of this process would write
    assert figures["comparison/<b>lora/time"] == 0.9
    assert figures["comparison/<b>lora/kinds.weights"] == 150_000_000
    assert not [key for key in figures if key.startswith("comparison/muon")]
    (table,) = folder.glob("media/table/comparison/*.table.json")
    content = json.loads(table.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert [row["name"] for row in rows] == ["as it is", "<b>lora", "muon"]
    assert (rows[1]["time"], rows[1]["time_p"], rows[2]["failed"]) == (0.9, 0.01, "no")
    (page,) = folder.glob("media/html/comparison/*.html")
    assert page.read_text() == html(comparison)
    record = unblocked(next(folder.parent.glob("*.wandb")).read_bytes())
    assert all(path.name.encode() in record for path in files)

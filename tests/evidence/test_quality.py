"""Tests of the arithmetic of benchmarks/quality.py: results after a kill, equal losses, and p as in scipy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from benchmarks.quality import BASELINE, RATES, SEEDS, TUNING_SEED, Arm
from lit_efficient import EMA

ARMS = [Arm("python", BASELINE), Arm("python", "other", lambda: [EMA()]), Arm("python", "same", lambda: [EMA(0.5)])]
NEEDED = {BASELINE: [80, 84, 78, 81, 79], "other": [40, 44, 41, 39, 43], "same": [81, 82, 79, 80, 80]}


def attempt(arm: Arm, rate: float, seed: int) -> dict[str, Any]:
    """Return a loss that falls to zero at the step that the arm needs at the second rate; at others it is higher."""
    zero = NEEDED[arm.name][seed % len(SEEDS)]
    higher = 0.0 if rate == RATES[1] else 0.1
    points = [(step, step / 10, max(0.0, 1 - step / zero) + higher) for step in range(0, 101, 10)]
    return {"val/loss": points}


def test_pieces_go_on_and_ratios_have_the_p_of_scipy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quality.jsonl"
    runs: list[tuple[str, float, int]] = []

    def counted(arm: Arm, rate: float, seed: int) -> dict[str, Any]:
        runs.append((arm.name, rate, seed))
        if len(runs) == 9:
            raise KeyboardInterrupt
        return attempt(arm, rate, seed)

    with pytest.raises(KeyboardInterrupt):
        quality.run(ARMS, file, math.inf, attempt=counted)
    with file.open("a") as opened:
        opened.write('{"task": "py')  # a kill within a line
    assert len(quality.records(file)) == 8
    assert quality.run(ARMS, file, math.inf, attempt=counted) == 0
    whole = len(ARMS) * (len(RATES) + len(SEEDS)) + 2 * len(SEEDS)  # the baseline, at all rates
    assert len(runs) == 1 + len({*runs}) == 1 + whole
    assert quality.run(ARMS, file, math.inf, attempt=counted) == 0  # nothing is run twice
    rows = quality.records(file)
    others = [r for r in rows if r["seed"] != TUNING_SEED]
    assert {r["rate"] for r in others if r["name"] != BASELINE} == {RATES[1]}
    assert {r["rate"] for r in others if r["name"] == BASELINE} == {*RATES}

    found = quality.table(ARMS, rows)
    assert {name for _, name, _, _ in found} == {"other", "same"}
    stats = pytest.importorskip("scipy.stats")
    ps = {}
    for name in ("other", "same"):
        logs = []
        for seed in SEEDS:
            ours, theirs = (
                quality.reached(attempt(arm, RATES[1], seed)["val/loss"], 0.0, 0)
                for arm in (next(arm for arm in ARMS if arm.name == one) for one in (name, BASELINE))
            )
            logs.append(math.log(ours / theirs))
        ps[name] = stats.ttest_1samp(logs, 0).pvalue
    least, most = sorted(ps, key=lambda name: ps[name])
    for what in ("steps", "seconds"):  # four rows in all: of two names, each twice
        assert found["python", least, "val/loss", what].p == pytest.approx(4 * ps[least], rel=1e-6)
    assert quality.verdict(found["python", "other", "val/loss", "steps"]) == "fewer"
    assert quality.verdict(found["python", "same", "val/loss", "steps"]) == "no evidence"
    shown = "\n".join(quality.lines(found))
    assert "no evidence" in shown
    assert most == "same"


def test_a_level_is_the_worse_end_and_is_interpolated() -> None:
    fast = [(10, 1.0, 4.0), (20, 2.0, 2.0), (30, 3.0, 1.0)]
    slow = [(10, 2.0, 5.0), (20, 4.0, 4.0), (30, 6.0, 3.0)]
    assert quality.pair_ratio(fast, slow, 0) == (15.0, 30.0)
    assert quality.pair_ratio(fast, slow, 1) == (1.5, 6.0)
    assert all(map(math.isnan, quality.pair_ratio([], slow, 0)))
    assert math.isnan(quality.reached(slow, 1.0, 0))


def test_a_recipe_changes_with_its_settings_and_names_are_told_apart() -> None:
    keys = [(arm.task, arm.name) for arm in quality.ARMS]
    assert len({*keys}) == len(keys)
    assert ARMS[1].recipe == Arm("python", "other", lambda: [EMA()]).recipe != Arm("python", "other").recipe
    json.dumps([arm.recipe for arm in quality.ARMS])  # each can be made


def test_evidence_is_that_against_the_baseline_at_each_of_its_rates() -> None:
    seeds = [0.5, 0.52, 0.48, 0.51, 0.49]
    clear = [(one, 1.0) for one in seeds]
    close = [(one, 0.51) for one in (0.5, 0.53, 0.47, 0.52, 0.48)]
    better = [(1.0, one) for one in seeds]
    least = quality.ratio_of([a for a, _ in close], [b for _, b in close]).p
    best = quality.against({1e-3: clear, 3e-3: clear}, 1e-3)
    assert best.value == pytest.approx(0.5, rel=0.01)
    assert best.p is not None
    assert best.p < 1e-4
    assert quality.against({1e-3: clear, 3e-3: close}, 1e-3).p == least  # one rate of the baseline does as well
    assert quality.against({1e-3: clear, 3e-3: better}, 1e-3).p == 1.0
    constant = [(40.0, 320.0)] * 5  # a rate at which the baseline is nowhere near
    assert quality.against({1e-3: clear, 9e-3: constant}, 1e-3).p == best.p


def test_what_is_recorded_stands_in_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "measured.md").write_text(f"# Measured\n\n{quality._PLACE} what can be run.\n", "utf-8")
    (tmp_path / "figures.json").write_text('{"environments": {}, "tables": {}, "records": [{"id": "a"}]}', "utf-8")
    monkeypatch.setattr(quality.figures, "ROOT", tmp_path)
    monkeypatch.setattr(quality.figures, "FILE", tmp_path / "figures.json")
    file = tmp_path / "quality.jsonl"
    quality.run(ARMS, file, math.inf, attempt=attempt)
    found = quality.table(ARMS, quality.records(file))
    for _ in range(2):  # the same again takes its place
        quality.record(found)
    source = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    mine = {one["id"]: one["figures"] for one in source["records"][1:]}
    assert mine["quality/python/other/val/loss"]["verdict"] == "fewer"
    assert mine["quality/python/same/val/loss"]["verdict"] == "no evidence"
    assert {len(one["cells"]) for one in source["records"][1:]} == {len(source["tables"]["quality"])}
    page = (tmp_path / "docs" / "measured.md").read_text("utf-8")
    assert page.count("<!-- figures: quality -->") == 1
    assert page.index("<!-- /figures -->") < page.index(quality._PLACE)


def test_a_rate_at_which_the_baseline_ends_worse_is_no_rival_and_a_close_one_is() -> None:
    ends = {1e-3: [3.0, 3.2, 2.9], 3e-3: [1.0, 1.1, 0.9], 9e-3: [1.05, 1.0, 1.1]}
    runs = {rate: {s: {"val/loss": [(9, 1.0, end)]} for s, end in enumerate(of)} for rate, of in ends.items()}
    assert quality._rivals(runs, "val/loss", 3e-3) == [3e-3, 9e-3]
    runs[9e-3][0] = {"val/loss": []}  # it broke
    assert quality._rivals(runs, "val/loss", 3e-3) == [3e-3]

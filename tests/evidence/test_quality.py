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


FACTORS = (1.1, 1.2, 1.15, 1.05, 1.3)
_ALL = quality.ARMS_IN_FEW_STEPS["few-step digits"]
FEW_ARMS = [*_ALL[:4], _ALL[-1]]


def few_attempt(arm: Arm, rate: float, seed: int) -> dict[str, Any]:
    """Return distances whose ratios to the baseline differ between seeds. The second rate is the best."""
    factor = FACTORS[seed % len(SEEDS)]
    found = {"1 step": 3.0 * factor, "2 steps": 2.0, "4 steps": 1.5, "50 steps": 1.0}
    if arm.name == quality.LONGER:
        found = {"1 step": 3.0, "2 steps": 2.0, "4 steps": 1.01, "50 steps": 0.9 * factor}
    elif arm.name != BASELINE:
        found = {"1 step": factor, "2 steps": 1 / factor, "4 steps": 1.01 * factor}
    worse = 1.0 if rate in (RATES[1], *quality.FEW_BASELINES["few-step digits"].rates) else 2.0
    return {quality.in_steps(n): [(320, 9.0, worse * seed * found[quality.in_steps(n)])] for n in arm.few}


def test_samples_in_few_steps_are_compared_with_the_baseline_of_the_same_seed(tmp_path: Path) -> None:
    file = tmp_path / "quality.jsonl"
    assert quality.run(FEW_ARMS, file, math.inf, attempt=few_attempt) == 0
    rows = quality.records(file)
    base, shortcut, _, matched, longer = FEW_ARMS
    for flow in (base, longer):
        assert {(r["rate"], r["seed"]) for r in rows if r["name"] == flow.name} == {(flow.rates[0], s) for s in SEEDS}
    assert {r["rate"] for r in rows if r["name"] == shortcut.name and r["seed"] in SEEDS} == {RATES[1]}
    found = quality.few_step_table(FEW_ARMS, rows)
    one = found[base.task, shortcut.name, "1 step", quality.OF_MANY]
    assert one.value == pytest.approx(math.prod(FACTORS) ** (1 / 5))
    raw = quality.ratio_of([FACTORS[s % 5] * s for s in SEEDS], [1.0 * s for s in SEEDS])
    assert one.p is not None
    assert raw.p is not None
    assert one.p > raw.p  # Holm
    other = found[base.task, shortcut.name, "4 steps", quality.OF_AS_MANY]
    assert other.value == pytest.approx(1.01 / 1.5 * math.prod(FACTORS) ** (1 / 5))
    distilled = found[base.task, matched.name, "4 steps", quality.OF_AS_MANY]  # as long as its teacher and itself
    assert distilled.value == pytest.approx(math.prod(FACTORS) ** (1 / 5))
    assert (base.task, base.name, "2 steps", quality.OF_AS_MANY) not in found
    assert {metric for _, name, metric, _ in found if name == matched.name} == {"4 steps"}
    part = quality.few_step_table(FEW_ARMS, [r for r in rows if r["seed"] not in SEEDS[3:]])
    assert quality.verdict(part[base.task, shortcut.name, "1 step", quality.OF_MANY]) == "3 of 5 seeds: unknown"


def test_a_recipe_does_not_change_with_text_or_with_code_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(step: int, warmup: int, total: float) -> float:
        """Return 1."""
        return 1.0

    def documented(step: int, warmup: int, total: float) -> float:
        """Return the number 1."""
        return 1.0

    def other(step: int, warmup: int, total: float) -> float:
        """Return 1."""
        return 2.0

    for one in (schedule, documented, other):
        monkeypatch.setattr(one, "__module__", quality.__name__)
    first, second, third = (Arm("python", "other", schedule=one).recipe for one in (schedule, documented, other))
    assert first == second != third


def test_a_level_is_the_worse_end_and_is_interpolated() -> None:
    fast = [(10, 1.0, 4.0), (20, 2.0, 2.0), (30, 3.0, 1.0)]
    slow = [(10, 2.0, 5.0), (20, 4.0, 4.0), (30, 6.0, 3.0)]
    assert quality.pair_ratio(fast, slow, 0) == (15.0, 30.0)
    assert quality.pair_ratio(fast, slow, 1) == (1.5, 6.0)
    assert all(map(math.isnan, quality.pair_ratio([], slow, 0)))
    assert math.isnan(quality.reached(slow, 1.0, 0))


@pytest.mark.turns(6, family="slow")
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


def test_what_is_recorded_is_written_into_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "figures.json").write_text('{"environments": {}, "tables": {}, "records": [{"id": "a"}]}', "utf-8")
    monkeypatch.setattr(quality.figures, "FILE", tmp_path / "figures.json")
    file = tmp_path / "quality.jsonl"
    quality.run(ARMS, file, math.inf, attempt=attempt)
    quality.run(FEW_ARMS, file, math.inf, attempt=few_attempt)
    rows = quality.records(file)
    few = quality.few_step_table(FEW_ARMS, rows)
    for _ in range(2):  # the same again takes its place
        kept = {"quality": quality.kept(quality.table(ARMS, rows)), "few_steps": quality.kept_few(few, FEW_ARMS, rows)}
        for name, table in kept.items():
            quality.figures.record_table(name, quality._COLUMNS[name], table)
    source = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    mine = {one["id"]: one["figures"] for one in source["records"][1:]}
    assert len(mine) == len(source["records"][1:])
    assert mine["quality/python/other/val/loss"]["verdict"] == "fewer"
    assert mine["quality/python/same/val/loss"]["verdict"] == "no evidence"
    assert mine["few_steps/few-step digits/baseline/50 steps"]["distance"] == "3.00"
    assert mine["few_steps/few-step digits/baseline/1 step"]["verdict"] == "larger, -"
    assert mine["few_steps/few-step digits/Shortcut/2 steps"]["verdict"] == "no evidence, smaller"
    assert "few_steps/few-step digits/DMD2 for 4 steps/4 steps" in mine
    for one in source["records"][1:]:
        assert len(one["cells"]) == len(source["tables"][one["table"]])
        assert all(quality.figures.filled(one, cell) for cell in one["cells"])


def test_a_rate_at_which_the_baseline_ends_worse_is_no_rival_and_a_close_one_is() -> None:
    ends = {1e-3: [3.0, 3.2, 2.9], 3e-3: [1.0, 1.1, 0.9], 9e-3: [1.05, 1.0, 1.1]}
    runs = {rate: {s: {"val/loss": [(9, 1.0, end)]} for s, end in enumerate(of)} for rate, of in ends.items()}
    assert quality._rivals(runs, "val/loss", 3e-3) == [3e-3, 9e-3]
    runs[9e-3][0] = {"val/loss": []}  # it broke
    assert quality._rivals(runs, "val/loss", 3e-3) == [3e-3]

"""Tests of the arithmetic of benchmarks/few_steps.py: what is left to run, ratios, and p by Holm's method."""

import math

import pytest

from benchmarks import few_steps
from benchmarks.few_steps import ARMS, MANY, SEEDS
from lit_efficient.evidence.comparing.estimates import ratio_of

FACTORS = (1.1, 1.2, 1.15, 1.05, 1.3)


def rows(seeds=SEEDS):
    found = []
    for seed, factor in zip(seeds, FACTORS):
        base = {"1": 3.0 * seed, "2": 2.0 * factor * seed, "4": 1.5 * seed, str(MANY): 1.0 * seed}
        found.append({"task": "digits", "name": "flow", "seed": seed, "found": base})
        ours = {"1": factor * seed, "2": seed / factor, "4": 1.01 * factor * seed}
        found.append({"task": "digits", "name": "Shortcut", "seed": seed, "found": ours})
    return found


def test_ratios_are_of_pairs_of_seeds_and_p_is_corrected_over_the_table():
    found = few_steps.table(ARMS, rows())
    mean, baseline = found["digits", "flow", MANY]
    assert (mean, baseline) == (3.0, None)
    _, one = found["digits", "Shortcut", 1]
    assert one.value == pytest.approx(math.prod(FACTORS) ** (1 / 5))
    raw = ratio_of([factor * seed for seed, factor in zip(SEEDS, FACTORS)], [1.0 * seed for seed in SEEDS])
    assert one.p > raw.p
    assert few_steps.verdict(one) == "farther"
    assert few_steps.verdict(found["digits", "Shortcut", 2][1]) == "closer"
    shown = "\n".join(few_steps.lines(found))
    assert "baseline" in shown
    assert "photos" not in shown


def test_a_table_without_all_seeds_says_so():
    found = few_steps.table(ARMS, rows(SEEDS[:3]))
    assert few_steps.verdict(found["digits", "Shortcut", 1][1]) == "3 of 5 seeds: unknown"


def test_only_missing_runs_are_left():
    left = [(task, arm.name, seed) for task, arm, seed in few_steps.left(rows(SEEDS[:4]), ARMS[:3])]
    assert left[0] == ("digits", "flow", 5)
    assert ("digits", "Shortcut", 5) in left
    assert ("digits", "Shortcut", 4) not in left
    assert sum(task == "photos" for task, _, _ in left) == 3 * len(SEEDS)

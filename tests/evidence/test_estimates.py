"""Tests of statistics against scipy, known results, and simulations."""

import math
import random
import statistics

import pytest

from lit_efficient.evidence.comparing.estimates import Estimate, holm, looked_at, mean_of, ratio_of


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706204736), (2, 4.302652730), (9, 2.262157163), (200, 1.971896224)]
)
def test_students_distribution_is_that_of_the_tables(freedom, quantile):
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(freedom + 1)]
    error = statistics.stdev(values) / math.sqrt(freedom + 1)
    found = mean_of([x - statistics.fmean(values) + quantile * error for x in values])
    assert (found.low, found.high) == pytest.approx((0, 2 * quantile * error), abs=1e-8)
    assert found.p == pytest.approx(0.05, rel=1e-8)


def test_it_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(0)
    a, b = ([draw.gauss(mean, 1) for _ in range(6)] for mean in (0.3, 0.0))
    mine, theirs = mean_of([x - y for x, y in zip(a, b)]), stats.ttest_rel(a, b)
    assert mine.p == pytest.approx(theirs.pvalue)
    assert (mine.low, mine.high) == pytest.approx(tuple(theirs.confidence_interval()))


def test_a_known_ratio_is_found_through_noise_that_both_share():
    draw = random.Random(1)
    within = 0
    for _ in range(200):
        machine = [math.exp(draw.gauss(0, 0.5)) for _ in range(6)]  # the machine is as busy for both
        pairs = [(0.8 * one * math.exp(draw.gauss(0, 0.02)), one * math.exp(draw.gauss(0, 0.02))) for one in machine]
        found = ratio_of([a for a, _ in pairs], [b for _, b in pairs])
        within += found.low <= 0.8 <= found.high
        assert found.evidence
        assert found.width < 0.2
    assert 180 <= within <= 198


def test_where_nothing_differs_evidence_is_as_rare_as_it_says():
    draw = random.Random(2)
    alone, several = 0, 0
    for _ in range(200):
        variants = {str(i): mean_of([draw.gauss(0, 1) for _ in range(4)]) for i in range(5)}
        alone += variants["0"].evidence
        several += any(one.evidence for one in holm(variants).values())
    assert alone <= 20
    assert several <= 20
    assert alone > 2  # it is a test at all


def test_runs_that_end_when_narrow_claim_no_more_than_others():
    stats, np = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    runs, found = np.random.default_rng(0).normal(0, 0.04, (4_000, 40)), []
    going = np.ones(len(runs), bool)
    for count in range(6, 41):
        seen = runs[going, :count]
        error = seen.std(1, ddof=1) / count**0.5
        reach = stats.t.ppf(0.975, count - 1) * error
        ends = (2 * np.sinh(reach) <= 0.05) | (count == 40)
        p = 2 * stats.t.sf(abs(seen.mean(1) / error), count - 1)
        found += [looked_at(Estimate(1, 0, 2, float(one), count)).evidence for one in p[ends]]
        going[going] = ~ends
    assert len(found) == 4_000
    assert 0.035 < sum(found) / 4_000 < 0.06  # without, 7 %


def test_what_cannot_be_told_is_not():
    assert mean_of([]).n == 0
    assert math.isnan(mean_of([]).value)
    one = mean_of([2.0])
    assert (one.value, one.p, one.n, one.evidence) == (2.0, None, 1, False)
    assert math.isnan(one.low)
    assert one.width == math.inf
    assert mean_of([0.0, 0.0]).p == 1.0
    assert mean_of([0.3, 0.3, 0.3]).p is None  # one value, three times
    assert math.isnan(mean_of([0.3, math.nan, 0.2]).value)
    assert mean_of([0.3, math.inf]).p is None


def test_holm_corrects_from_the_smallest_on():
    found = holm({name: Estimate(0, 0, 0, p, 3) for name, p in {"a": 0.04, "b": 0.01, "c": None, "d": 0.02}.items()})
    assert {name: one.p for name, one in found.items()} == {"a": 0.04, "b": 0.03, "c": None, "d": 0.04}

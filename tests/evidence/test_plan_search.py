"""Tests of searches: they find the same value as trying all, with few plans."""

import pytest

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.planning.plan_search import TRIES, Predictions, Refusal, SearchEnded, largest
from tests.evidence.known_plans import by_formula, plan_of

LIMIT = 10_000_000
FORMULAS = {
    "line": lambda n: 1_000_000 + 77_777 * n,
    "steep": lambda n: 9_000_000 + 400_000 * n,
    "flat": lambda n: 5_000_000 + 1_300 * n,
    "rounded up": lambda n: 2_000_000 + -(-n * 50_000 // 65_536) * 65_536,
    "square": lambda n: 1_000_000 + 1_000 * n + 37 * n * n,
    "two lines": lambda n: max(4_000_000 + 1_000 * n, 90_000 * n - 2_000_000),
}


def batch(value: int) -> Change:
    return Change("", {"data.batch_size": value})


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("start", [1, 8, 300])
def test_the_largest_is_what_counting_finds_in_a_dozen_plans(name, start):
    peak, made = FORMULAS[name], []
    answer = max(n for n in range(1, 5_000) if peak(n) <= LIMIT)
    found = largest(Predictions(by_formula(peak, made), LIMIT), batch, start)
    assert found.value == answer
    assert found.above == answer + 1
    assert found.plan is not None
    assert (found.plan.peak, found.above_peak) == (peak(answer), peak(answer + 1))
    assert len(made) == len(set(made)) <= TRIES


def test_multiples_and_what_never_fits():
    predictions = Predictions(by_formula(FORMULAS["line"]), LIMIT)
    assert largest(predictions, batch, 128, step=64).value == 64
    nothing = largest(Predictions(by_formula(lambda n: LIMIT + n), LIMIT), batch, 8)
    assert nothing.value is None
    assert nothing.above == 1


def test_what_is_refused_does_not_fit_and_says_why():
    def predict(change):
        n = change.settings["data.batch_size"]
        if n > 37:
            raise ConfigurationError("37 rows are all there are\n  and more lines")
        return plan_of({"activations": n})

    found = largest(Predictions(predict, LIMIT), batch, 8)
    assert (found.value, found.above, found.above_peak) == (37, 38, None)
    assert found.reason == "37 rows are all there are"


def test_a_library_that_fails_on_a_change_refuses_it_and_a_fit_that_fails_by_itself_fails():
    def predict(change):
        raise RuntimeError("no such kernel")

    predictions = Predictions(predict, LIMIT)
    assert predictions(batch(3)) == Refusal("RuntimeError: no such kernel")
    with pytest.raises(RuntimeError, match="kernel"):
        predictions()


def test_progress_tells_how_many_plans_are_left(monkeypatch):
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    said: list[str] = []
    predictions = Predictions(by_formula(FORMULAS["line"]), LIMIT, said.append)
    predictions.begin("data.batch_size", 5)
    for n in range(1, 5):
        predictions(batch(n))
    assert said[0] == "data.batch_size: 1 plans made, 3.0 s each, at most 12 s for this search"
    assert len(said) == 3
    predictions.seconds["a plan that took longer"] = 30.0
    predictions(batch(5))
    assert said[3] == "data.batch_size: 5 plans made, 8.4 s each, at most 30 s for this search"


def test_a_search_ends_before_plans_that_would_take_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def predict(change):
        now[0] += 2.0 + 0.01 * change.settings["data.batch_size"]
        return plan_of({"activations": change.settings["data.batch_size"]})

    found = largest(Predictions(predict, 10**9), batch, 4)
    assert found.value is not None
    assert 1_990 < found.value <= 2_004  # whose plan takes 20 seconds more than that of 4
    assert found.above is not None
    assert found.above > 2_004
    assert found.reason == "not tried, because its plan would take long; values below it may fit"
    assert now[0] < 60


def test_a_search_ends_with_its_time_and_promises_no_more(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    made: list[int] = []

    def predict(change):
        now[0] += 50.0
        return by_formula(FORMULAS["steep"], made)(change)

    said: list[str] = []
    predictions = Predictions(predict, LIMIT, said.append)
    predictions(batch(7))
    predictions.end_after(70)
    predictions.begin("batch", 100)
    found = largest(predictions, batch, 1)  # the second plan begins before the end and may take its time
    assert made == [7, 1, 2]
    assert predictions.stopped
    assert (found.value, found.above) == (2, None)
    with pytest.raises(SearchEnded):
        predictions(batch(4))
    assert predictions.smallest()[1].peak == FORMULAS["steep"](1)
    seconds = [int(line.rpartition("at most ")[2].split()[0]) for line in said if "at most" in line]
    assert seconds == [70, 20]


def test_a_search_without_time_finds_nothing():
    predictions = Predictions(by_formula(FORMULAS["line"]), LIMIT)
    predictions.end_after(0)
    with pytest.raises(SearchEnded):
        largest(predictions, batch, 8)

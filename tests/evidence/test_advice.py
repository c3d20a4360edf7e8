"""Tests of advice: it is the cheapest set that fits among all sets, and each piece of it is planned."""

import itertools
import random

import pytest
import yaml

from lit_efficient.errors import ConflictError
from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.planning.advice import Advice, Adviser, Candidate, cheapest
from lit_efficient.evidence.planning.plan_search import Predictions
from lit_efficient.evidence.planning.plan_settings import Lever
from tests.evidence.known_plans import candidates_of, plan_of
from tests.support import Toy, trainer

COSTS = {"one": 2, "two": 3, "three": 5, "four": 7, "five": 9}


def model(seed: int, clash: frozenset[frozenset[str]] = frozenset()):
    """Return a function that plans a step with two moments. Each technique scales each moment by a random factor."""
    draw = random.Random(seed)
    shares = {name: (draw.choice([0.4, 0.7, 1.0]), draw.choice([0.4, 0.7, 1.0])) for name in COSTS}

    def predict(change: Change):
        names = set(change.overlays)
        if any(pair <= names for pair in clash):
            raise ConflictError("they do not go together")
        backward, step = 600_000 * change.settings.get("data.batch_size", 2) // 2, 500_000
        for name in names:
            backward, step = backward * shares[name][0], step * shares[name][1]
        return plan_of({"weights": max(int(backward), int(step))}, change.settings.get("data.batch_size", 2))

    return predict


def of(names) -> Change:
    return Change("", {}, tuple(sorted(names, key=COSTS.__getitem__)))


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_set_is_what_trying_all_finds(seed):
    predictions = Predictions(model(seed), limit=random.Random(seed).randrange(50_000, 600_000))
    every = [set(some) for n in range(len(COSTS) + 1) for some in itertools.combinations(COSTS, n)]
    fit = [some for some in every if predictions.fits(of(some))]
    dearest = [sorted((COSTS[name] for name in some), reverse=True) for some in fit]
    made = Predictions(model(seed), predictions.limit)
    chosen = cheapest(made, candidates_of(COSTS))
    assert (chosen is None) == (not fit)
    assert sorted((one.cost for one in chosen or ()), reverse=True) == min(dearest, default=[])
    assert len(made.seconds) <= 2 * len(COSTS)


@pytest.mark.parametrize("seed", range(40))
def test_sets_that_are_refused_are_not_chosen_and_nothing_is_left_in_that_is_not_needed(seed):
    pairs = random.Random(seed).sample(list(itertools.combinations(COSTS, 2)), 3)
    predictions = Predictions(model(seed, frozenset(map(frozenset, pairs))), limit=250_000)
    skipped: dict[str, str] = {}
    chosen = cheapest(predictions, candidates_of(COSTS), skipped=skipped)
    names = {one.overlay for one in chosen or ()}
    assert set(skipped.values()) <= {"they do not go together"}
    if chosen is not None:
        assert predictions.fits(of(names))
        assert not any(predictions.fits(of(names - {name})) for name in names)


def test_one_that_excludes_a_cheaper_one_gets_its_turn():
    def predict(change):
        if len(change.overlays) > 1:
            raise ConflictError("one alone")
        return plan_of({"weights": {(): 100, ("one",): 90, ("two",): 40}.get(change.overlays, 80)})

    chosen = cheapest(Predictions(predict, 50), candidates_of(COSTS))
    assert [one.name for one in chosen or ()] == ["Two"]


def advised(predict, limit: int, among: list[Candidate], accumulate: int = 1, batch: int = 2) -> list[Advice]:
    from lit_efficient.evidence.fits import Fit

    fit = Fit(trainer(max_steps=1, accumulate_grad_batches=accumulate), Toy())

    def no_length():
        return Lever(("data.max_length",), 512, 64)

    lever = Lever(("data.batch_size",), batch)
    return list(Adviser(Predictions(predict, limit), among, fit, lever, no_length).all())


def test_a_smaller_batch_keeps_the_effective_one_and_is_the_largest_that_fits():
    def predict(change):
        size = change.settings.get("data.batch_size", 12)
        assert size * change.settings.get("trainer.accumulate_grad_batches", 2) == 24
        return plan_of({"activations": 10 * size}, size)

    (advice,) = advised(predict, 70, [], accumulate=2, batch=12)
    assert advice.words == ["--data.batch_size", "6", "--trainer.accumulate_grad_batches", "4"]
    assert yaml.safe_load(advice.yaml) == {"data": {"batch_size": 6}, "trainer": {"accumulate_grad_batches": 4}}
    assert advice.plan.peak == 60


def test_another_training_stands_apart_and_only_where_the_same_one_does_not_fit_or_costs_more():
    def predict(change):
        shares = {"one": 0.9, "two": 0.1, "three": 0.5}
        size = 100.0
        for name in change.overlays:
            size *= shares[name]
        return plan_of({"weights": int(size)})

    dear = candidates_of({"one": 2, "two": 3, "three": 5}, {"two": "other"})
    titles = {advice.title: [one.name for one in advice.techniques] for advice in advised(predict, 50, dear, batch=1)}
    assert list(titles.values()) == [["Three"], ["Two"]]
    assert ["CHANGES THE RESULT" in title for title in titles] == [False, True]
    cheap = candidates_of({"one": 2, "three": 3, "two": 5}, {"two": "other"})
    assert [advice.title for advice in advised(predict, 50, cheap, batch=1)] == ["the same result, at the same batch"]
    (only,) = advised(predict, 20, dear, batch=1)
    assert only.title.startswith("CHANGES THE RESULT")


def test_where_nothing_else_helps_the_context_gets_shorter():
    def predict(change):
        return plan_of({"activations": change.settings.get("data.max_length", 512)})

    (advice,) = advised(predict, 300, candidates_of({"one": 2}), batch=1)
    assert advice.words == ["--data.max_length", "256"]
    assert "changes the result" in advice.title

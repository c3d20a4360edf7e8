"""Every pair of techniques: refused with a reason, or both effects hold and the run resumes bit-exactly.

Pairs that share a phase or a hook run each time, many in one run. Of all pairs one of 120 runs alone, another one
from commit to commit. ``pytest --all-pairs`` runs every pair alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_efficient import ConfigurationError, ConflictError, GaLore, LoRA, MixtureOfExperts, QuantizeBase
from lit_efficient.declaration import Declaration, Hooks
from lit_efficient.technique import PrecisionTechnique, Technique
from lit_efficient.testing import check_resumes
from tests.contract.row import Row
from tests.contract.table import CASES, NAMES, allowed, case
from tests.turns import commit

PAIRS = [pair for pair in itertools.combinations(NAMES, 2) if allowed(*pair)]
SHARE = 120
SIZE = 16  # of a group
SLOW = "Compile"  # seconds for each of many techniques; COMPILED in table.py is its group
# Whose networks are their own: one of them in a group, with what a pair test has beside it, too.
OWN = {"MixtureOfDepths", "MixtureOfExperts", "NEFTune", "TiledMLP", "TokenRouting"}
ALONE = {"PeftAdapter", "QuantizeBase"}  # which refuse each other in networks of other techniques
# On whose networks not all effects of many others show: each of their pairs runs by itself, one in five in a turn.
IN_PAIRS = {"ExpertsBackend", "LossFreeBalancing", "MultiTokenPrediction"}
IN_PAIRS_SHARE = 5
# What nearly all define, to say what they are or to clean up; the order of two of these cannot matter.
STARTS = ("pissa", "olora", "eva", "corda", "lora_ga", "lora_fa")  # of LoRA
COMMON = {"arguments", "check", "describe", "on_exception", "on_fit_start", "record", "setup", "__init__", "teardown"}


@functools.cache
def hooks(name: str) -> set[str]:
    """The methods of the contract and the hooks of Lightning that a technique's class defines."""
    kind = type(CASES[name].make())
    declared = [vars(part) for part in (Declaration, *Hooks.__subclasses__())]
    ours = {m for part in declared for m, value in part.items() if callable(value) or isinstance(value, classmethod)}
    theirs = {method for method in vars(Callback) if method.startswith("on_")}
    contract = {*Technique.__mro__, *PrecisionTechnique.__mro__, Hooks, *Hooks.__subclasses__()}
    between = [base for base in kind.__mro__ if base not in contract]
    return {method for base in between for method in vars(base) if method in ours | theirs} - COMMON


@functools.cache
def same_phase(one: str, other: str) -> bool:
    """Whether two techniques act at the same time."""
    phases = {type(CASES[name].make()).phase for name in (one, other)}
    return len(phases) == 1 and None not in phases


def meet(one: str, other: str) -> bool:
    """Whether two techniques act at the same place."""
    return same_phase(one, other) or bool(hooks(one) & hooks(other))


@functools.cache
def groups() -> list[tuple[str, ...]]:
    """Sets of techniques that go together, with every two that meet in one of them, but for the slow one's."""
    groups, left = [], {pair for pair in PAIRS if meet(*pair) and SLOW not in pair}
    while left:
        group = [*min(left)]
        while len(group) < SIZE and IN_PAIRS.isdisjoint(group):
            new = {
                n: len(left.intersection(_pairs([*group, n])))
                for n in NAMES
                if n not in (SLOW, *OWN, *IN_PAIRS, *group)
            }
            best = sorted((n for n in new if new[n] > len(left.intersection(_pairs(group)))), key=lambda n: -new[n])
            name = next((n for n in best if not {*group, n} >= ALONE and allowed(*group, n)), None)
            if name is None:
                break
            group.append(name)
        groups.append(tuple(sorted(group)))
        left.difference_update(_pairs(group))
    return groups


def _pairs(group: Iterable[str]) -> list[tuple[str, ...]]:
    return [*itertools.combinations(sorted(group), 2)]


def chosen(everything: bool, turn: int) -> list[tuple[str, ...]]:
    """The pairs and groups to run."""
    if everything:
        return [*PAIRS]
    alone = PAIRS[turn::SHARE]
    together = [group for group in groups() if IN_PAIRS.isdisjoint(group)]
    by_themselves = [group for group in groups() if not IN_PAIRS.isdisjoint(group)]
    more = [*together, *by_themselves[turn % IN_PAIRS_SHARE :: IN_PAIRS_SHARE]]
    return [*alone, *(group for group in more if group not in alone)]


def pytest_generate_tests(metafunc: Any) -> None:
    if "names" in metafunc.fixturenames:
        runs = chosen(metafunc.config.getoption("--all-pairs"), commit() % SHARE)
        metafunc.parametrize("names", runs, ids=["+".join(names) for names in runs])


def test_all_effects_hold_and_the_run_resumes(names: tuple[str, ...]) -> None:
    check_resumes(case(*names))


@functools.cache
def options() -> dict[str, tuple[str, Row]]:
    """Options whose mechanism is not that of the technique's row: the technique, and its row with the option."""
    starts = {f"LoRA {one}": ("LoRA", partial(LoRA, 2, variant=one), {}) for one in STARTS}
    others = {
        "LoRA of experts": ("LoRA", partial(LoRA, 2, targets="all-linear+experts"), {"experts": True}),
        "QuantizeBase of experts": ("QuantizeBase", partial(QuantizeBase, experts=True), {"experts": True}),
        "GaLore with a basis in 4 bits": ("GaLore", partial(GaLore, 2, basis_bits=4), {"effect": lambda run: None}),
        "MixtureOfExperts with a bias": (
            "MixtureOfExperts",
            partial(MixtureOfExperts, 4, 1, balance_loss=0.0, bias_rate=0.1),
            {"effect": lambda run: None},  # that of the row is for its own arguments
        ),
    }
    made = {**starts, **others}
    return {key: (name, replace(CASES[name], make=make, beside={}, **how)) for key, (name, make, how) in made.items()}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:LoRA. 1 adapters had no gradient")  # experts of the toy behind ids of tokens
@pytest.mark.parametrize("other", NAMES)
@pytest.mark.parametrize("option", [*options()])
def test_an_option_beside_each_technique_resumes_or_is_refused(
    option: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, row = options()[option]
    monkeypatch.setitem(CASES, name, row)
    if other == name or not allowed(name, other):
        return
    try:
        check_resumes(case(name, other))
    except (ConfigurationError, ConflictError) as refused:
        if not str(refused).startswith((name, other)):
            raise


def test_each_pair_has_its_turn() -> None:
    runs = [chosen(False, turn) for turn in range(SHARE)]
    assert {*PAIRS} == {names for names in itertools.chain(*runs) if len(names) == 2} == {*chosen(True, 0)}
    met = {pair for pair in PAIRS if meet(*pair) and SLOW not in pair}
    ran_together = [{pair for names in ran for pair in _pairs(names)} for ran in runs]
    for ran, together in zip(runs, ran_together, strict=True):
        assert {pair for pair in met if IN_PAIRS.isdisjoint(pair)} <= together <= {*PAIRS}
        assert len(ran) < len(PAIRS) / 20
    assert met <= set().union(*ran_together[:IN_PAIRS_SHARE])
    assert meet("EMA", "PowerEMA")  # one phase
    assert meet("ExactResume", "StochasticDepth")  # one hook, and no phase in common

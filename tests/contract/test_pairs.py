"""Every pair of techniques: refused with a reason, or both effects hold and the run resumes bit-exactly.

Pairs that share a phase or a hook run each time. Of the others a tenth does, another one from commit to commit;
``pytest --all-pairs`` runs all.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from lightning.pytorch import Callback

from lit_efficient.declaration import Declaration
from lit_efficient.technique import Technique
from lit_efficient.testing import check_resumes
from tests.contract.table import CASES, NAMES, allowed, case
from tests.turns import commit

PAIRS = [pair for pair in itertools.combinations(NAMES, 2) if allowed(*pair)]
SHARE = 10
# What nearly all define, to say what they are or to clean up; the order of two of these cannot matter.
COMMON = {"arguments", "check", "describe", "on_exception", "on_fit_start", "record", "setup", "__init__", "teardown"}


@functools.cache
def hooks(name: str) -> set[str]:
    """The methods of the contract and the hooks of Lightning that a technique's class defines."""
    kind = type(CASES[name].make())
    ours = {method for method, value in vars(Declaration).items() if callable(value) or isinstance(value, classmethod)}
    theirs = {method for method in vars(Callback) if method.startswith("on_")}
    between = kind.__mro__[: kind.__mro__.index(Technique)]
    return {method for base in between for method in vars(base) if method in ours | theirs} - COMMON


@functools.cache
def meet(one: str, other: str) -> bool:
    """Whether two techniques act at the same place."""
    phases = {type(CASES[name].make()).phase for name in (one, other)}
    return (len(phases) == 1 and None not in phases) or bool(hooks(one) & hooks(other))


def chosen(everything: bool, turn: int) -> list[tuple[str, str]]:
    """The pairs to run."""
    apart = [pair for pair in PAIRS if not meet(*pair)]
    left_out = set() if everything else {pair for i, pair in enumerate(apart) if i % SHARE != turn}
    return [pair for pair in PAIRS if pair not in left_out]


def pytest_generate_tests(metafunc: Any) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = chosen(metafunc.config.getoption("--all-pairs"), commit() % SHARE)
        metafunc.parametrize("pair", pairs, ids=["+".join(pair) for pair in pairs])


def test_both_effects_hold_and_the_run_resumes(pair: tuple[str, str]) -> None:
    check_resumes(case(*pair))


def test_each_pair_has_its_turn() -> None:
    assert set(PAIRS) == {pair for turn in range(SHARE) for pair in chosen(False, turn)} == set(chosen(True, 0))
    assert ("EMA", "PowerEMA") in chosen(False, 0)  # one phase
    assert meet("ExactResume", "StochasticDepth")  # one hook, and no phase in common
    assert len(chosen(False, 0)) < len(PAIRS)

"""What holds for every technique alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import lit_efficient
from lit_efficient import Technique
from lit_efficient.testing import CHECKS, Case, check_cleans_up
from tests.contract.table import NAMES, case

# All hooks are tried with many techniques at once, in test_together.py.
HOOKS = ("on_before_backward", "on_validation_start", "on_train_end")


def _clean(one: Case) -> None:
    check_cleans_up(one, HOOKS)


_clean.__name__ = check_cleans_up.__name__


def test_every_public_technique_has_a_row() -> None:
    public = {name: getattr(lit_efficient, name) for name in lit_efficient.PUBLIC}
    kinds = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Technique)}
    assert sorted(kinds - {"Technique"}) == NAMES


@pytest.mark.parametrize("check", [_clean if c is check_cleans_up else c for c in CHECKS], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_contract(name: str, check: Callable[[Case], None]) -> None:
    check(case(name))

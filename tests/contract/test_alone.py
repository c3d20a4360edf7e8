"""What holds for every technique alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lit_efficient
from lit_efficient import Technique
from lit_efficient.declaration import Declaration, Hooks
from lit_efficient.testing import CHECKS, Case, check_cleans_up, check_deep_copy, check_loads_safely, check_standalone
from tests.contract.table import NAMES, TOGETHER, case

# All hooks are tried with many techniques at once, in test_together.py.
HOOKS = ("on_before_backward", "on_validation_start", "on_train_end")
# test_together.py asserts the same of each weight that a technique of TOGETHER adds or changes.
AMONG_OTHERS = (check_cleans_up, check_deep_copy, check_loads_safely, check_standalone)


def test_every_public_technique_has_a_row_and_a_test_of_its_own() -> None:
    public = {name: getattr(lit_efficient, name) for name in lit_efficient.PUBLIC}
    kinds = {
        name: value for name, value in public.items() if isinstance(value, type) and issubclass(value, Declaration)
    }
    techniques = [name for name, kind in kinds.items() if kind is not Technique and Hooks not in kind.__bases__]
    assert sorted(techniques) == NAMES
    files = {name: "{}/test_{}.py".format(*lit_efficient.PUBLIC[name].split(".")) for name in NAMES}
    assert [file for file in files.values() if not (Path(__file__).parents[1] / file).is_file()] == []


def _rows() -> list[Any]:
    """Every check of every technique; nightly what is asserted of the technique among all others, too."""
    return [
        pytest.param(
            name,
            check,
            id=f"{name}-{check.__name__}",
            marks=[pytest.mark.nightly] if check in AMONG_OTHERS and name in TOGETHER else [],
        )
        for name in NAMES
        for check in CHECKS
    ]


@pytest.mark.parametrize(("name", "check"), _rows())
def test_keeps_the_contract(name: str, check: Callable[[Case], None]) -> None:
    check_cleans_up(case(name), HOOKS) if check is check_cleans_up else check(case(name))

"""Which cases of a large family CI runs: a share that is fixed by the commit. Nightly runs the others."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest


@functools.cache
def commit() -> int:
    """The commit that is checked out, as a number; 0 where there is none."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16)


def family_of(item: pytest.Item) -> str:
    """The family that its mark names; without a name it is all cases of the function."""
    return item.get_closest_marker("turns").kwargs.get("family") or item.nodeid.partition("[")[0]


def resting(cases: Sequence[str], one_of: int, turn: int, always: Collection[str] = ()) -> set[str]:
    """The cases that have their turn another time: ``one_of`` turns run all, and each runs those of ``always``."""
    unknown = {*always} - {*cases}
    assert not unknown, f"no such case: {unknown}"
    return {case for i, case in enumerate(cases) if i % one_of != turn % one_of and case not in always}

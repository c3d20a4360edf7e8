"""Which cases of a large family CI runs: a share that is fixed by the commit. Nightly runs the others."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest


@functools.cache
def commit() -> int:
    """How many commits lead to the one that is checked out; of a shallow clone its hash, and 0 where there is none."""
    shallow, _, name = _git("rev-parse", "--is-shallow-repository", "HEAD").partition("\n")
    return int(_git("rev-list", "--count", "HEAD") or 0) if shallow == "false" else int(name or "0", 16)


def _git(*command: str) -> str:
    here = Path(__file__).parent
    found = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def family_of(item: pytest.Item) -> str:
    """The family that its mark names; without a name it is all cases of the function."""
    return item.get_closest_marker("turns").kwargs.get("family") or item.nodeid.partition("[")[0]


def resting(cases: Sequence[str], one_of: int, turn: int, always: Collection[str] = ()) -> set[str]:
    """The cases that have their turn another time: ``one_of`` turns run all, and each runs those of ``always``."""
    unknown = {*always} - {*cases}
    assert not unknown, f"no such case: {unknown}"
    return {case for i, case in enumerate(cases) if i % one_of != turn % one_of and case not in always}

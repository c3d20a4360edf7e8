"""Choose the cases of a large family that CI runs: a share that the commit fixes. The nightly run takes the others."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest


@functools.cache
def commit() -> int:
    """Return the number of commits up to HEAD; the hash of HEAD in a shallow clone, and 0 without git."""
    shallow, _, name = _git("rev-parse", "--is-shallow-repository", "HEAD").partition("\n")
    return int(_git("rev-list", "--count", "HEAD") or 0) if shallow == "false" else int(name or "0", 16)


def _git(*command: str) -> str:
    here = Path(__file__).parent
    found = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def family_of(item: pytest.Item) -> str:
    """Return the family that the mark of a test names; by default the name of the test function."""
    return item.get_closest_marker("turns").kwargs.get("family") or item.nodeid.partition("[")[0]


def resting(cases: Sequence[str], one_of: int, turn: int, always: Collection[str] = ()) -> set[str]:
    """Return the cases to skip in this turn.

    ``one_of`` turns together run all cases, and each of them runs the cases of ``always``.
    """
    unknown = {*always} - {*cases}
    assert not unknown, f"no such case: {unknown}"
    return {case for i, case in enumerate(cases) if i % one_of != turn % one_of and case not in always}

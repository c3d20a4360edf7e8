"""Row 15: faults put into the package one at a time, and its tests; see :mod:`benchmarks.mutations`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.mutations import Client, names
from benchmarks.trust_rows import Piece


@cache
def _client() -> Any:
    return Client()


def _trial(case: str, folder: Path) -> str:
    answer: str = _client().attempt(case)
    return answer


PIECES = (
    Piece(
        15,
        "faults",
        "A sign, a comparison, a condition, a constant or a call is changed in a core file: a test of that file fails",
        names,
        _trial,
        in_ci=0,
    ),
)

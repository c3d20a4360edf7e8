"""Pieces of the fault-injection suite. Each module of this package lists its pieces in ``PIECES``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "lit_efficient"


@dataclass(frozen=True)
class Piece:
    """Group of cases with one expectation.

    Args:
        row: Number of its chapter, a key of ``trust.ROWS``.
        name: Word with hyphens. Results are stored in a file of this name.
        sentence: Description of the action in each case and of the expected behaviour.
        cases: Function that returns the names of all cases, the same on each call.
        trial: Function that runs one case. The working directory is an empty folder. It returns one line that describes
            the failure, or "" if the expectation holds.
        subject: Package under test: this one, or a peer for comparison.
        in_ci: Number of cases that CI runs. Nightly runs draw other cases.
    """

    row: int
    name: str
    sentence: str
    cases: Callable[[], Sequence[str]]
    trial: Callable[[str, Path], str]
    subject: str = OURS
    in_ci: int = 1


def pieces() -> list[Piece]:
    """Return all pieces, sorted by row."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [
        piece for name in modules for piece in getattr(importlib.import_module(f"{__name__}.{name}"), "PIECES", ())
    ]
    names = [piece.name for piece in found]
    assert len({*names}) == len(names), f"two pieces of one name: {names}"
    return sorted(found, key=lambda piece: piece.row)

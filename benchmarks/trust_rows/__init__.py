"""The pieces of the scoreboard of trust: what a row of it tries, and how, stands in the ``PIECES`` of a module here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "lit_efficient"


@dataclass(frozen=True)
class Piece:
    """One figure of the scoreboard: so many cases tried, so many held.

    Args:
        row: Its row on the scoreboard.
        name: One word with hyphens; results lie in a file of this name.
        sentence: What is done in each case, and what must hold.
        cases: The names of all cases, the same each time.
        trial: Tries one of them in an empty folder that is the working directory, and says what went wrong, in a line;
            "" if it held. What it raises is a fault of the trial, not of its subject, and ends the piece.
        subject: Who is tried: peers stand beside us.
        in_ci: How many of the cases CI tries, and others nightly.
    """

    row: int
    name: str
    sentence: str
    cases: Callable[[], Sequence[str]]
    trial: Callable[[str, Path], str]
    subject: str = OURS
    in_ci: int = 1


def pieces() -> list[Piece]:
    """All pieces, by row."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [
        piece for name in modules for piece in getattr(importlib.import_module(f"{__name__}.{name}"), "PIECES", ())
    ]
    names = [piece.name for piece in found]
    assert len({*names}) == len(names), f"two pieces of one name: {names}"
    return sorted(found, key=lambda piece: piece.row)

"""Hostile inputs, each with a canary: a file ``CANARY`` that their code would make, a secret beside the case's folder.

A case makes its files in a folder of its own, beside one with a secret and files to fall victim, and gives them to the
real command or to the reader that takes such a file. An audit hook, the times at which files were read and the folder
itself tell what was done; processor time and memory are limited for what comes after the input was made.
"""

from __future__ import annotations

import importlib

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.hostile.cases import MAKERS
from benchmarks.trust_rows.hostile.trial import trial

for _kind in ("pickles", "checkpoints", "configs", "data", "images", "models", "folders", "shadows"):
    importlib.import_module(f"{__name__}.{_kind}")  # adds its cases, in this order

PIECES = (
    Piece(
        9,
        "hostile",
        "A hostile file, folder or config is given to the command or reader that takes it: none of its code runs, "
        "nothing outside the case's folder is read or written, no connection is opened, and it ends within 10 s of a "
        "processor and 2 GiB.",
        lambda: tuple(MAKERS),
        trial,
        in_ci=8,
    ),
)

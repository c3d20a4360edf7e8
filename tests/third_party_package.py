"""Installs the package of somebody else's that registers techniques: real files and real metadata, on ``sys.path``."""

from __future__ import annotations

from pathlib import Path

CLAMP = '''"""Clamp weights to [-bound, bound] after each step.

    w <- min(max(w, -bound), bound)

Saves: nothing
Costs: one pass over the weights a step
Source: nobody
"""

from pathlib import Path
from typing import ClassVar

import torch

from lit_efficient import Phase, Report, Technique

Path("clamp_kit_was_imported").touch()


class Clamp(Technique):
    """Clamp.

    Args:
        bound: The largest weight, above 0.
    """

    phase = Phase.CONSTRAIN
    conflicts: ClassVar[dict[str, str]] = {"StochasticDepth": "for the sake of the example"}

    def __init__(self, bound: float = 0.125) -> None:
        super().__init__()
        self.bound = bound

    def describe(self, module):
        return Report("weights within a bound")

    @torch.no_grad()
    def after_step(self, optimizer, module):
        for parameter in module.parameters():
            parameter.clamp_(-self.bound, self.bound)


class Unregistered(Clamp):
    """The same, but nobody has registered it."""
'''


def install(folder: Path, package: str = "clamp_kit", name: str = "clamp-kit", entries: str = "") -> None:
    """Put package and metadata into a folder, as an installer does.

    Args:
        folder: A folder of ``sys.path``.
        package: Name of the package that is imported.
        name: Name of the distribution.
        entries: Lines of entry points; by default the one of ``Clamp``.
    """
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text('import pathlib\n\npathlib.Path("clamp_kit_was_imported").touch()\n')
    (folder / package / "clamp.py").write_text(CLAMP)
    metadata = folder / f"{package}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    entries = entries or f"Clamp = {package}.clamp:Clamp"
    (metadata / "entry_points.txt").write_text(f"[lit_efficient.techniques]\n{entries}\n")

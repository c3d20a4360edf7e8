"""The configs of the package, found by name from any folder.

``lora`` is ``techniques/lora`` and ``language_model`` is ``tasks/language_model``; other names keep their folder, as in
``llm/lora``. An existing path takes precedence over a name.
"""

import os
import re
from pathlib import Path

from lit_efficient.errors import ConfigurationError, nearest

BARE = ("tasks", "techniques")
"""Folders whose configs are named without the folder. No name occurs in both."""
# Text that may be a name or a path: no inline YAML, no option, no URL.
_NAME = re.compile(r"[\w./~\\][\w./~\\-]*")


def folder() -> Path:
    """Return the folder of the configs: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    if inside.is_dir():
        return inside
    return package.parent / "configs"


def known() -> dict[str, Path]:
    """Return all configs by name, sorted by folder."""
    return {name_of(path): path for path in sorted(folder().glob("*/*.yaml"))}


def summary(path: Path) -> str:
    """Return the first sentence of a config's first comment line."""
    with path.open(encoding="utf-8") as file:
        line = file.readline().lstrip("# ").strip().removeprefix("Overlay: ")
    return line.partition(". ")[0].rstrip(".:")


def name_of(path: Path) -> str:
    """Return the name of a config on the command line."""
    if path.parent.name in BARE:
        return path.stem
    return f"{path.parent.name}/{path.stem}"


def located(given: str) -> str:
    """Return the path of the config named ``given``; return ``given`` if it is an existing file or no name."""
    if os.path.exists(given) and not os.path.isdir(given):
        return given
    head, _, stem = given.rpartition("/")
    return str(known().get(stem if head in BARE else given, given))


def find(given: str) -> str:
    """Return the path of the config named ``given``, or ``given`` if it is a path.

    Raises:
        ConfigurationError: If there is no such config or file; the message suggests similar names.
    """
    path = located(given)
    if path != given or os.path.exists(given) or not _NAME.fullmatch(given):
        return path
    stem = Path(given).stem
    stems = {name.rpartition("/")[2] for name in known()}
    similar = [stem] if stem in stems else nearest(stem, stems, 3)
    names = " or ".join(repr(name) for one in similar for name in known() if name.rpartition("/")[2] == one)
    advice = f", did you mean {names}?" if names else ""
    raise ConfigurationError(
        f"config: there is no file {given!r}{advice}\n  `python -m lit_efficient configs` lists the configs by name"
    )

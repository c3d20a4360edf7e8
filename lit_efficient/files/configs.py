"""The configs that come with the package, found by name from any folder.

``lora`` is ``techniques/lora``, ``language_model`` is ``tasks/language_model``; all others keep the folder in their
name: ``llm/lora``. A path that exists comes first.
"""

import os
import re
from pathlib import Path

from lit_efficient.errors import ConfigurationError, nearest

BARE = ("tasks", "techniques")
"""Folders whose configs need no folder in front of their name: no name stands in both."""
# What may be meant for a name or a path: no YAML itself, no option, no address.
_NAME = re.compile(r"[\w./~\\][\w./~\\-]*")


def folder() -> Path:
    """Where they lie: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return inside if (inside := package / "configs").is_dir() else package.parent / "configs"


def known() -> dict[str, Path]:
    """All of them by name, in the order of their folders."""
    return {name_of(path): path for path in sorted(folder().glob("*/*.yaml"))}


def summary(path: Path) -> str:
    """What one is: the first sentence of its first line."""
    with path.open(encoding="utf-8") as file:
        line = file.readline().lstrip("# ").strip().removeprefix("Overlay: ")
    return line.partition(". ")[0].rstrip(".:")


def name_of(path: Path) -> str:
    """What one is called on the command line."""
    return path.stem if path.parent.name in BARE else f"{path.parent.name}/{path.stem}"


def located(given: str) -> str:
    """The path of the config with a name; any other text, and a path that exists, as it is."""
    if os.path.exists(given) and not os.path.isdir(given):
        return given
    head, _, stem = given.rpartition("/")
    return str(known().get(stem if head in BARE else given, given))


def find(given: str) -> str:
    """The path of the config with a name, or the path that is given.

    Raises:
        ConfigurationError: If it is neither, naming those that it may be meant for.
    """
    path = located(given)
    if path == given and not os.path.exists(given) and _NAME.fullmatch(given):
        stem = Path(given).stem
        stems = {name.rpartition("/")[2] for name in known()}
        like = {stem} & stems or nearest(stem, stems, 3)
        names = " or ".join(repr(name) for name in known() if name.rpartition("/")[2] in like)
        advice = f", did you mean {names}?" if names else ""
        raise ConfigurationError(
            f"config: there is no file {given!r}{advice}\n  `python -m lit_efficient configs` lists those that it has"
        )
    return path

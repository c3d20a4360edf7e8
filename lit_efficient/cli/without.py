"""What takes techniques out of a list: ``callbacks-: [EMA]`` in an overlay, ``--without EMA`` on the command line.

Both become items of what is appended, which is where earlier files and options are known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import plugins

from lit_efficient import PUBLIC
from lit_efficient.cli.run import DEFAULTS, LeftOut
from lit_efficient.errors import did_you_mean
from lit_efficient.internals.jsonargparse_parser import ChangesValues

_OUT = "without"
_KEY = re.compile(r"(.*\.)?(callbacks|plugins)-")
_OF_PLUGINS = ("plugins", "precision")  # modules of classes in `trainer.plugins`
_ALWAYS = [DEFAULTS[key] for key in ("checkpoints", "signals", "metrics", "divergence")]
_LATER = [DEFAULTS["prefetch"]]  # which are added to a trainer that is there, and can be left out


def options(names: Sequence[str]) -> list[str]:
    """What stands at the end of the command line for each ``--without NAME``."""
    return [f"--trainer.{_slot(name)}+={json.dumps([{_OUT: name}])}" for name in names]


def _slot(name: str) -> str:
    leaf = _leaf(name)
    return "plugins" if PUBLIC.get(leaf, "").startswith(_OF_PLUGINS) or leaf in plugins.__all__ else "callbacks"


def marked(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """A loaded mapping in which the names below ``callbacks-`` are the first items below ``callbacks+``.

    Raises:
        yaml.YAMLError: If they are no names, or stand beside a list that replaces the earlier one.
    """
    result = dict(tree)
    for key in [key for key in tree if _KEY.fullmatch(str(key))]:
        names = [given] if isinstance(given := result.pop(key), str) else given
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise yaml.YAMLError(f"{key} is no list of names of classes, as in [EMA, LoRA]")
        if key[:-1] in tree:
            raise yaml.YAMLError(
                f"{key} takes out of what earlier files give, and beside {key[:-1]} there is none left"
            )
        more = result.pop(appended := f"{key[:-1]}+", [])
        result[appended] = [{_OUT: name} for name in names] + (more if isinstance(more, list) else [more])
    return result


class TakesOut(ChangesValues):
    """A list of parts from which later files and options may take some."""

    def appended(self, value: Any, earlier: Any) -> tuple[Any, list[Any]] | None:
        if isinstance(value, str) and value.startswith(f'[{{"{_OUT}"'):
            value = json.loads(value)
        items = value if isinstance(value, list) else []
        names = [item[_OUT] for item in items if isinstance(item, dict) and item.keys() == {_OUT}]
        if not names:
            return None
        parts = earlier if isinstance(earlier, list) else [earlier] if earlier else []
        for name in names:
            parts = self._taken(name, parts)
        return [item for item in items if not (isinstance(item, dict) and _OUT in item)], parts

    def _taken(self, name: str, parts: list[Any]) -> list[Any]:
        """The parts without those of a class; a full name is of one package."""
        package = name.partition(".")[0] if "." in name else ""
        meant = [
            part
            for part in parts
            if _leaf(_path(part)) == _leaf(name) and package in ("", _path(part).partition(".")[0])
        ]
        if _leaf(name) in _ALWAYS and all(_path(part).startswith("lit_efficient.") for part in meant):
            raise TypeError(f'Parser key "{self.dest}":\n  every run has {_leaf(name)}: it cannot be taken out')
        kept = [part for part in parts if not any(part is one for one in meant)]
        if _leaf(name) in _LATER:
            path = f"{LeftOut.__module__}.{LeftOut.__name__}"
            return [*kept, {"class_path": path, "init_args": {"name": _leaf(name)}}]
        if not meant:
            there = list(dict.fromkeys(_leaf(_path(part)) for part in parts))
            advice = f"{did_you_mean(name, there)} (accepted: {', '.join(there) or 'none'})"
            raise TypeError(f'Parser key "{self.dest}":\n  there is no {name!r} to take out{advice}')
        return kept


def _path(part: Any) -> str:
    """The class path of an item: a mapping, a name alone, or an object that a script has made."""
    if isinstance(part, Mapping | Namespace):
        return str(part.get("class_path", ""))
    return part if isinstance(part, str) else f"{type(part).__module__}.{type(part).__name__}"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]

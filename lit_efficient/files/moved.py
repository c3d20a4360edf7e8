"""Where arguments, configs and modules of the release before are now: kept for one release, then this file goes.

A config with an old key, path or module is refused with the new one. A checkpoint is not: its arguments are translated.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MOVED_KEYS: dict[str, dict[str, str]] = _TABLES["keys"]  # of a class: an argument, and where its value stands now
MOVED_PATHS: dict[str, str] = _TABLES["paths"]  # configs, and modules that a ``class_path`` could name


def moved_key(owner: type | None, key: str) -> str:
    """Where an argument of a class (or of one that it inherits from) is now, as the end of a sentence; else ""."""
    name, dot, inside = key.partition(".")
    known = (MOVED_KEYS.get(cls.__name__, {}) for cls in (owner.__mro__ if owner else ()))
    return next((f": it is now {keys[name] + dot + inside!r}" for keys in known if name in keys), "")


def moved_path(path: str) -> str:
    """Where a config or a module is now, as the end of a sentence; "" for one that has not moved."""
    return next((f": it is now {new!r}" for old, new in MOVED_PATHS.items() if path.endswith(old)), "")


def takes_moved_keys(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that is given what checkpoints record, under the keys of the release before or of now."""

    @functools.wraps(init)
    def translated(self: object, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **translate(init.__qualname__.split(".")[0], kwargs))

    return translated


def translate(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a checkpoint records of the class ``name``, under the keys that the class has now."""
    now: dict[str, Any] = {}
    for key, value in arguments.items():
        *groups, leaf = MOVED_KEYS.get(name, {}).get(key, key).split(".")
        place = now
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return now

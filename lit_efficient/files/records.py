"""Objects rebuilt from the constructor arguments that a checkpoint records."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import signature
from typing import Any, TypeVar

_T = TypeVar("_T")


def rebuild(cls: Callable[..., _T], stored: Mapping[str, Any]) -> _T:
    """Return ``cls(**stored)``; a mapping for an argument whose default is a dataclass becomes that dataclass."""
    arguments = dict(stored)
    for name, parameter in signature(cls).parameters.items():
        if is_dataclass(parameter.default) and isinstance(arguments.get(name), Mapping):
            arguments[name] = rebuild(type(parameter.default), arguments[name])
    return cls(**arguments)

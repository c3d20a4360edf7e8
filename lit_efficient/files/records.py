"""What checkpoints record of arguments, as the objects that they were."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import signature
from typing import Any, TypeVar

_T = TypeVar("_T")


def rebuild(cls: Callable[..., _T], stored: Mapping[str, Any]) -> _T:
    """The object of ``cls`` whose arguments a checkpoint records as primitives.

    Those whose default is a dataclass are dictionaries.
    """
    arguments = dict(stored)
    for name, parameter in signature(cls).parameters.items():
        if is_dataclass(parameter.default) and isinstance(arguments.get(name), Mapping):
            arguments[name] = rebuild(type(parameter.default), arguments[name])
    return cls(**arguments)

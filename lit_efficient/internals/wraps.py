"""Wraps of methods of one object, which can be removed in any order.

A wrap is a ``functools.partial`` in the object's ``__dict__``, and the method that it wraps is stored there too.
Nothing is captured in a closure, so the wraps of a deep copy are independent. A bound method would not survive a
pickle, which looks it up on the object by the name of the function. A wrap must be a plain function without
``__wrapped__``, because Lightning reads ``__code__`` and follows ``__wrapped__`` to decide whether a hook is
overridden, and reads the signature to decide which arguments to pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_WRAPS = "_lit_efficient_wraps"  # attribute: name of a method -> wraps from inside to outside -> what each one wraps
_ABSENT = "absent"  # stands for the method of the class; a string, so that it survives a deep copy


def does_nothing(*_: object, **__: object) -> None:
    """Do nothing, with any arguments. It replaces methods that must not act."""


@contextmanager
def temporarily(owner: object, /, **values: object) -> Iterator[None]:
    """Context in which attributes of ``owner`` have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def wrap_method(target: Any, name: str, function: Callable[..., object]) -> None:
    """Make ``target.name(...)`` call ``function(target, ...)``, which may call :func:`inner_method`.

    Wrapping with the same function again has no effect. The function must be defined in a module, not be a closure.
    """
    wraps = target.__dict__.setdefault(_WRAPS, {}).setdefault(name, {})
    if function not in wraps:
        wraps[function] = target.__dict__.get(name, _ABSENT)
        target.__dict__[name] = partial(function, target)


def inner_method(target: Any, name: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Return the method that ``function`` wraps: an earlier wrap, an attribute of the instance, or the class's method.

    For a wrap that has been removed, but is still called by someone who kept it, it is the class's method.
    """
    inner = target.__dict__.get(_WRAPS, {}).get(name, {}).get(function, _ABSENT)
    if inner == _ABSENT:
        return partial(getattr(type(target), name), target)
    return inner


def unwrap_method(target: Any, name: str, function: Callable[..., object]) -> None:
    """Remove one wrap, and keep those outside and inside it. Without this wrap it has no effect."""
    wraps = target.__dict__.get(_WRAPS, {}).get(name, {})
    if function not in wraps:
        return
    around = list(wraps)[list(wraps).index(function) + 1 :]
    inner = wraps.pop(function)
    if around:
        wraps[around[0]] = inner
    elif inner == _ABSENT:
        target.__dict__.pop(name, None)
    else:
        target.__dict__[name] = inner


@contextmanager
def wrapped(target: object, function: Callable[..., object], *names: str) -> Iterator[None]:
    """Context in which methods are wrapped with ``function``. See :func:`wrap_method`."""
    for name in names:
        wrap_method(target, name, function)
    try:
        yield
    finally:
        for name in names:
            unwrap_method(target, name, function)

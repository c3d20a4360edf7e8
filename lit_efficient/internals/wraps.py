"""Methods of one object that call the method before them, and can be taken off in any order.

A wrap is a bound method in the object's ``__dict__``, and what it wraps is noted there, too: nothing is captured, so a
deep copy has wraps of its own. It must be a plain function, without ``__wrapped__``: Lightning reads ``__code__`` and
follows ``__wrapped__`` to decide whether a hook is overridden, and reads the signature to decide what to pass.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_WRAPS = "_lit_efficient_wraps"  # of an object: name of a method -> the functions around it -> what each one wraps
_ABSENT = "absent"  # nothing but the class's method: a string, so that it survives a deep copy


def does_nothing(*_: Any, **__: Any) -> None:
    """What takes the place of a method that is not to act."""


@contextmanager
def temporarily(owner: Any, /, **values: Any) -> Iterator[None]:
    """Let attributes have other values while the context is open."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def wrap_method(target: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``target.name(...)`` be ``function(target, ...)``, which may call :func:`inner_method`; once for a function.

    The function is one of a module, not a closure.
    """
    wraps = target.__dict__.setdefault(_WRAPS, {}).setdefault(name, {})
    if function not in wraps:
        wraps[function] = target.__dict__.get(name, _ABSENT)
        target.__dict__[name] = types.MethodType(function, target)


def inner_method(target: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``function`` wraps on ``target``: an earlier wrap, what was set on the instance, or the class's method.

    Somebody may have kept a wrap that was taken off since: then it is the class's method.
    """
    inner = target.__dict__.get(_WRAPS, {}).get(name, {}).get(function, _ABSENT)
    return partial(getattr(type(target), name), target) if inner == _ABSENT else inner


def unwrap_method(target: Any, name: str, function: Callable[..., Any]) -> None:
    """Take one wrap off and leave those around it and inside it; without it nothing happens."""
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
def wrapped(target: Any, function: Callable[..., Any], *names: str) -> Iterator[None]:
    """Let methods be ``function`` inside, as :func:`wrap_method` does."""
    for name in names:
        wrap_method(target, name, function)
    try:
        yield
    finally:
        for name in names:
            unwrap_method(target, name, function)

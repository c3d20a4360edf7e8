"""Read what containers and objects of any class hold, without calling the methods of that class.

A class that derives from ``list`` or ``tuple`` may raise in ``__len__``, compute its items in ``__iter__`` or load
files in ``values``. Code that walks a user's objects must neither fail nor start such work. The methods of the built-in
class return what is stored.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

# OrderedDict before dict, because it keeps the order by itself.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def contents(value: object, most: int | None = None) -> list[Any]:
    """Return what is stored in a built-in container or a subclass: items, or the keys and values of a dictionary.

    Args:
        value: Any object. Other objects have no contents.
        most: Largest number of items to return. ``None``: all.
    """
    kind = _container(value)
    if kind is None:
        return []
    if issubclass(kind, dict):
        items = chain(kind.keys(value), kind.values(value))
    else:
        items = kind.__iter__(value)
    return [*islice(items, most)]


def length(value: object) -> int:
    """Return the number of items that are stored in a built-in container or a subclass; 0 for other objects."""
    kind = _container(value)
    return 0 if kind is None else int(kind.__len__(value))


def attributes(value: object) -> dict[str, Any]:
    """Return the dictionary of an object's attributes, or an empty one if the object has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def is_mutable(value: object) -> bool:
    """Return whether a value is a built-in container, or an instance of a subclass, whose items can be replaced."""
    return issubclass(type(value), dict | list | set | deque)


def restorer(container: object) -> Callable[[], None]:
    """Return a function that puts the present items of a mutable container back, in place and in their order."""
    kind = _container(container)
    fill = kind.update if issubclass(kind, dict | set) else kind.extend
    kept = contents(container)
    items = dict(kind.items(container)) if issubclass(kind, dict) else kept

    def restore() -> None:
        now = contents(container)
        if len(now) != len(kept) or any(a is not b for a, b in zip(now, kept)):
            kind.clear(container)
            fill(container, items)

    return restore


def _container(value: object) -> Any:
    return next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)

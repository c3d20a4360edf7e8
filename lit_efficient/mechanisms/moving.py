"""Batches, whatever they are nested in: copied to a device without waiting for it, and rows of them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """Copy what a batch holds to a device without waiting for it: tensors, and objects with a method ``to``.

    Args:
        batch: Tensors in any nesting of mappings, sequences, named tuples and dataclasses; of other kinds nothing is
            changed. Containers keep their types.
        device: Where to.

    Example:
        >>> move({"x": [torch.ones(1)], "name": "a"}, torch.device("meta"))
        {'x': [tensor(..., device='meta', size=(1,))], 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to") and not isinstance(batch, type):
        try:
            moved = batch.to(device, non_blocking=True)
        except TypeError:
            moved = batch.to(device)
        return batch if moved is None else moved
    return rebuilt(batch, lambda item: move(item, device))


def rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A container with each of its items changed: a mapping, a sequence, a named tuple or a dataclass, of its type.

    Of another kind it is returned as it is.
    """
    if isinstance(batch, Mapping):
        items = {key: change(value) for key, value in batch.items()}
        if not hasattr(batch, "__setitem__"):
            return type(batch)(items)  # type: ignore[call-arg]
        other: Any = copy.copy(batch)
        for key, value in items.items():
            other[key] = value
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        other = copy.copy(batch)
        for part in fields(batch):
            object.__setattr__(other, part.name, change(getattr(batch, part.name)))
        return other
    return batch


def take_rows(batch: Any, rows: Tensor | slice, size: int) -> Any:
    """Some rows of a batch.

    Args:
        batch: Nested containers; of tensors [size, ...] and lists of ``size`` items without tensors the rows are taken,
            others stay.
        rows: Indices [n], or a slice of them.
        size: Rows of the batch.

    Example:
        >>> take_rows({"x": torch.arange(3), "name": ["a", "b", "c"], "scale": 2.0}, torch.tensor([0, 2]), 3)
        {'x': tensor([0, 2]), 'name': ['a', 'c'], 'scale': 2.0}
    """
    if isinstance(batch, Tensor):
        place = rows.to(batch.device) if isinstance(rows, Tensor) else rows
        return batch[place] if batch.shape[:1] == (size,) else batch
    plain = isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and next(tensors_in(batch), None) is None
    if plain and len(batch) == size:
        return batch[rows] if isinstance(rows, slice) else type(batch)(batch[i] for i in rows.tolist())
    return rebuilt(batch, lambda item: take_rows(item, rows, size))


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in a batch, as :func:`move` finds them."""
    if isinstance(batch, Tensor):
        yield batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from tensors_in([getattr(batch, part.name) for part in fields(batch)])
    elif isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(item)

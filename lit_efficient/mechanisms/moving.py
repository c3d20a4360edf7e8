"""Operations on nested batches: asynchronous copies to a device, and selection of rows."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.contents import length

COUNT_OF = "count_of_"
"""Beginning of the name of an entry with the numbers of items [B] that each row of a batch has in another entry.

A row may have several images, or none: ``pixel_values`` [N, ...] are then split by ``count_of_pixel_values``.
"""


def holds_images(batch: Any) -> bool:
    """Return whether a batch holds tokens and images, by the names that the processors of transformers give them."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return False
    return any(str(name).startswith("pixel_values") for name in batch)


def move(batch: Any, device: torch.device) -> object:
    """Copy the tensors of a batch, and objects with a method ``to``, to a device without waiting for the copies.

    Args:
        batch: Tensors in any nesting of mappings, sequences, named tuples and dataclasses, which keep their types.
            Objects of other kinds are returned unchanged.
        device: Target device.

    Example:
        >>> move({"x": [torch.ones(1)], "name": "a"}, torch.device("meta"))
        {'x': [tensor(..., device='meta', size=(1,))], 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(type(batch), "to"):  # not of the instance: a dictionary may give its items as attributes
        try:
            moved = batch.to(device, non_blocking=True)
        except TypeError:
            moved = batch.to(device)
        return batch if moved is None else moved  # some methods work in place and return None
    return rebuilt(batch, lambda item: move(item, device))


def rebuilt(batch: Any, change: Callable[[Any], Any]) -> object:
    """Return a copy of a container in which each item is replaced by ``change(item)``.

    Mappings, sequences, named tuples and dataclasses keep their types. Objects of other kinds are returned unchanged.
    """
    if isinstance(batch, Mapping):
        items = {key: change(value) for key, value in batch.items()}
        if not hasattr(type(batch), "__setitem__"):
            return type(batch)(items)  # type: ignore[call-arg]
        other: Any = copy.copy(batch)
        for key, value in items.items():
            other[key] = value
        return other
    if isinstance(batch, tuple) and hasattr(type(batch), "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        other = copy.copy(batch)
        for part in fields(batch):
            object.__setattr__(other, part.name, change(getattr(batch, part.name)))
        return other
    return batch


def take_rows(batch: Any, rows: Tensor | slice, size: int) -> object:
    """Return some rows of a batch.

    Args:
        batch: Nested containers. Rows are taken from tensors [size, ...] and from lists of ``size`` items without
            tensors. Other items are kept. In a mapping with entries of `COUNT_OF`, the items of the rows are taken.
        rows: Indices [n], or a slice.
        size: Number of rows of the batch.

    Raises:
        ConfigurationError: For an object with tensors whose rows are unknown, such as a graph or a ``PackedSequence``,
            and for images without entries of `COUNT_OF`, unless each row has one.

    Example:
        >>> take_rows({"x": torch.arange(3), "name": ["a", "b", "c"], "scale": 2.0}, torch.tensor([0, 2]), 3)
        {'x': tensor([0, 2]), 'name': ['a', 'c'], 'scale': 2.0}
    """
    if isinstance(batch, Tensor):
        if batch.shape[:1] != (size,):
            return batch
        return batch[rows.to(batch.device) if isinstance(rows, Tensor) else rows]
    if hasattr(type(batch), "to") and not isinstance(batch, Mapping) and not is_dataclass(batch):
        raise ConfigurationError(
            f"the batch holds a {type(batch).__name__}, and it is unknown how to take rows of it. Give tensors in "
            "dictionaries, tuples, lists or dataclasses, and build the object in training_step"
        )
    if isinstance(batch, Mapping) and any(str(name).startswith(COUNT_OF) for name in batch):
        return _take_items(batch, rows, size)
    if holds_images(batch) and len(batch.get("pixel_values", batch["input_ids"])) != size:
        raise ConfigurationError(
            f"the batch holds {size} rows and {len(batch['pixel_values'])} images or parts of them, and it is unknown "
            f"which belong to which row. Add {COUNT_OF}pixel_values [{size}] with their numbers"
        )
    plain = isinstance(batch, list | tuple) and not hasattr(type(batch), "_fields")
    if plain and length(batch) == size and next(tensors_in(batch), None) is None:
        if isinstance(rows, slice):
            return batch[rows]
        return type(batch)(batch[i] for i in rows.tolist())
    return rebuilt(batch, lambda item: take_rows(item, rows, size))


def _take_items(batch: Mapping[str, Any], rows: Tensor | slice, size: int) -> object:
    """Return some rows of a mapping with numbers of items, as `take_rows`. Entries without an item are left out."""
    counts = {name.removeprefix(COUNT_OF): value for name, value in batch.items() if name.startswith(COUNT_OF)}
    taken = {name: take_rows(value, rows, size) for name, value in batch.items() if name not in counts}
    kept = torch.arange(size)[rows.cpu() if isinstance(rows, Tensor) else rows].tolist()
    for name, count in counts.items():
        parts = batch[name].split(count.tolist())
        found = torch.cat([parts[row] for row in kept])
        if len(found):
            taken[name] = found
        else:
            del taken[f"{COUNT_OF}{name}"]
    return taken


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch, in the order of its containers."""
    if isinstance(batch, Tensor):
        yield batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from tensors_in([getattr(batch, part.name) for part in fields(batch)])
    elif isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(item)

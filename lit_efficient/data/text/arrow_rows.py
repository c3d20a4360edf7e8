"""Rows of Arrow tables (parquet, ``Dataset.save_to_disk``, the hub) as the objects that JSON lines would give.

Arrow has one schema for all rows. An object that lacks a key of another row's object gets the key with null, so a null
in an object means that the key is absent. A null in a list, in a map or in a value of the type JSON was in the data.

Three things cannot be known from an Arrow table: whether a null in an object was in the data, the order of an object's
keys in its row, and whether a whole number in a column of floats was written without a fraction.

Numbers of classes whose names the data set declares (``datasets.ClassLabel``) are :class:`ClassNumber`.
"""

import json
from collections.abc import Iterator
from typing import Any

Content = dict[str, Any]


class ClassNumber(int):
    """Number of a class, with the ``names`` of all classes of its column."""

    names: tuple[str, ...]


def rows_of(table: Any) -> Iterator[Content | str]:
    """Yield the rows of a ``pyarrow.Table`` or ``RecordBatch``. For a row that cannot be read, yield the reason."""
    kinds = {field.name: field.type for field in table.schema}
    classes = _declared_classes(table.schema)
    for row in table.to_pylist(maps_as_pydicts="lossy"):
        try:
            plain = {name: _plain(value, kinds[name]) for name, value in row.items()}
        except ValueError as error:
            yield f"a value of the type JSON is no JSON: {error}"
            continue
        for name, names in classes.items():
            plain[name] = _of_classes(plain[name], names)
        yield plain


def _declared_classes(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of classes that ``datasets`` has written into a schema, by the column."""
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = about.get("info", {}).get("features") or {}
    found = {}
    for column, feature in features.items():
        of_items = feature.get("feature", feature)  # of a list
        if column in schema.names and of_items.get("_type") == "ClassLabel":
            found[column] = tuple(of_items["names"])
    return found


def _of_classes(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_of_classes(item, names) for item in value]
    if not isinstance(value, int) or not 0 <= value < len(names):  # -1 is no label
        return value
    number = ClassNumber(value)
    number.names = names
    return number


def _plain(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSON would give it."""
    import pyarrow
    from pyarrow import types

    if value is None:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType):
        # The type of `datasets` for values that differ from row to row.
        if kind.extension_name == "arrow.json":
            return json.loads(value)
        return _plain(value, kind.storage_type)
    if types.is_struct(kind):
        plain = {field.name: _plain(value[field.name], field.type) for field in kind}
        return {name: item for name, item in plain.items() if item is not None}
    if types.is_map(kind):
        return {name: _plain(item, kind.item_type) for name, item in value.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value

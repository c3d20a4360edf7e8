"""Rows of Arrow tables (parquet, ``Dataset.save_to_disk``, the hub) as the objects that JSON lines would give.

Arrow has one schema for all rows. An object that lacks a key of another row's object gets the key with null, so a null
in an object means that the key is absent. A null in a list, in a map or in a value of the type JSON was in the data.

Three things cannot be known from an Arrow table: whether a null in an object was in the data, the order of an object's
keys in its row, and whether a whole number in a column of floats was written without a fraction.
"""

import json
from collections.abc import Iterator
from typing import Any

Content = dict[str, Any]


def rows_of(table: Any) -> Iterator[Content | str]:
    """Yield the rows of a ``pyarrow.Table`` or ``RecordBatch``. For a row that cannot be read, yield the reason."""
    kinds = {field.name: field.type for field in table.schema}
    for row in table.to_pylist(maps_as_pydicts="lossy"):
        try:
            yield {name: _plain(value, kinds[name]) for name, value in row.items()}
        except ValueError as error:
            yield f"a value of the type JSON is no JSON: {error}"


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

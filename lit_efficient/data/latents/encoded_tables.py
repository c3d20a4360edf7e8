"""Encoded data sets in parquet and in WebDataset's tars.

parquet   columns of numbers, lists of lists, or bytes of arrays
tar       a sample is the files of one name, a field each suffix, "json.label" the label in .json:
          00017.latents.npy  00017.cls  00017.txt  00017.json  ->  {"latents.npy", "cls", "txt", "json.label"}
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lit_efficient.data.latents.encoded_rows import UNSAFE, Value, np_bytes, pickled
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tables import map_table


class TableRows:
    """Rows of parquet files, or of tars.

    Raises:
        ConfigurationError: If they cannot be read.
    """

    def __init__(self, layout: Literal["parquet", "webdataset"], files: Sequence[Path]) -> None:
        self._rows = map_table("EncodedData", layout, files).flatten()
        self._strip = layout == "webdataset"  # a text file ends in a newline

    @property
    def fields(self) -> list[str]:
        """Names of the columns; ``json.label`` is ``label`` in ``json``."""
        return list(self._rows.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """A row of some columns."""
        return {field: self._value(row, field) for field in fields}

    def _value(self, row: int, field: str) -> Value:
        if Path(field).suffix.lower() in UNSAFE:
            raise pickled(f"a file .{field}")
        scalar = self._rows.data.column(field)[row]
        if not scalar.is_valid:
            raise ConfigurationError(f"EncodedData: row {row} has no {field!r}.")
        value = _value_of(scalar)
        return value.strip() if self._strip and isinstance(value, str) else value


def _value_of(scalar: Any) -> Value:
    """A list of lists as an array of as many axes, bytes of an array as that, anything else as Python has it."""
    values, lengths = getattr(scalar, "values", None), []
    if values is None:
        found: Value = scalar.as_py()
        return np_bytes(found) if isinstance(found, bytes) else found
    while "list" in str(values.type).split("<", maxsplit=1)[0]:
        lengths.append(len(values))
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    counts = [*lengths, len(array)]  # at each depth: [4, 128] lists with 4096 numbers are 4 x 32 x 32
    return array.reshape(counts[0], *(after // before for before, after in itertools.pairwise(counts)))

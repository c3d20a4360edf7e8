"""Encoded data sets in parquet: columns of numbers, lists of lists, or bytes of arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.latents.encoded_rows import Value, np_bytes
from lit_efficient.errors import ConfigurationError


class ParquetFiles:
    """Columns of parquet files; those that are asked for are read at first use and stay in memory.

    Args:
        files: The files, of one schema, in order.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ConfigurationError(
                "EncodedData: parquet needs pyarrow: pip install lit-efficient[diffusion]."
            ) from error
        self._files = [str(path) for path in files]
        opened = [pq.ParquetFile(path) for path in self._files]
        self._names = list(opened[0].schema_arrow.names)
        self._length = sum(file.metadata.num_rows for file in opened)
        self._columns: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}  # workers that are spawned read their own

    @property
    def fields(self) -> list[str]:
        """Names of the columns."""
        return list(self._names)

    def __len__(self) -> int:
        return self._length

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """A row of some columns."""
        return {field: _arrow_value(self._column(field)[row]) for field in fields}

    def _column(self, field: str) -> Any:
        if field not in self._columns:
            import pyarrow as pa
            import pyarrow.parquet as pq

            tables = [pq.read_table(path, columns=[field], partitioning=None) for path in self._files]
            self._columns[field] = pa.concat_tables(tables).column(0)
        return self._columns[field]


def _arrow_value(scalar: Any) -> Value:
    """A list of lists as an array of as many axes, bytes of an array as that, anything else as Python has it."""
    values, lengths = getattr(scalar, "values", None), []
    if values is None:
        found: Value = scalar.as_py()
        return np_bytes(found) if isinstance(found, bytes) else found
    while "list" in str(values.type).split("<", maxsplit=1)[0]:
        lengths.append(len(values))
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    return array.reshape(_axes(lengths, len(array)))


def _axes(lengths: Sequence[int], total: int) -> list[int]:
    """Axes of nested lists from how many there are at each depth: [4, 128] lists with 4096 numbers: 4 x 32 x 32."""
    counts = [*lengths, total]
    return [counts[0], *(after // before for before, after in itertools.pairwise(counts))]

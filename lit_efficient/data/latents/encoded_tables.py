"""Encoded data sets in parquet and in WebDataset's tars, read by Hugging Face's `datasets`.

    parquet   columns of numbers, lists of lists, or bytes of arrays
    tar       a sample is the files of one name, a field each suffix, "json.label" the label in .json:
              00017.latents.npy  00017.cls  00017.txt  00017.json  ->  {"latents.npy", "cls", "txt", "json.label"}

The rows are copied into one Arrow file, which is mapped into memory: any row is read alone, in 0.1 ms.

Costs: the copy, once, in the cache: as much disk as the rows take, about 1 ms a tar's sample
"""

from __future__ import annotations

import glob
import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.latents.encoded_rows import UNSAFE, Value, np_bytes, refusal
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root

_INSTALL = "EncodedData: parquet and tars need datasets: pip install lit-efficient[diffusion]."


class TableRows:
    """Rows of parquet files, or of tars.

    Args:
        layout: ``parquet`` or ``webdataset``.
        files: The files, in order.

    Raises:
        ConfigurationError: If they cannot be read.
    """

    def __init__(self, layout: str, files: Sequence[Path]) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigurationError(_INSTALL) from error
        import pyarrow

        names = [glob.escape(str(path.absolute())) for path in files]
        errors = (datasets.exceptions.DatasetsError, pyarrow.ArrowException, tarfile.TarError, ValueError, OSError)
        try:
            self._rows = datasets.load_dataset(
                layout, data_files={"train": names}, split="train", cache_dir=str(cache_root() / "datasets")
            ).flatten()
        except errors as error:
            raise ConfigurationError(
                f"EncodedData: {files[0]}, or another of the {len(files)} files, cannot be read as {layout}: "
                f"{error.__cause__ or error}."
            ) from error
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
            raise ConfigurationError(refusal(f"a file .{field}"))
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
    return array.reshape(_axes(lengths, len(array)))


def _axes(lengths: Sequence[int], total: int) -> list[int]:
    """Axes of nested lists from how many there are at each depth: [4, 128] lists with 4096 numbers: 4 x 32 x 32."""
    counts = [*lengths, total]
    return [counts[0], *(after // before for before, after in itertools.pairwise(counts))]

"""Rows of encoded data sets in safetensors, parquet and tar files, and helpers that all readers of encoded data share.

    safetensors   tensors of equal length; the first axis is the row
    parquet       columns of numbers, lists of lists, or bytes of arrays
    tar           WebDataset: a sample is the files with one name, and each suffix is a field. "json.label" is the
                  entry "label" of the .json file:
                  00017.latents.npy  00017.cls  00017.txt  00017.json  ->  {"latents.npy", "cls", "txt", "json.label"}

Safetensors files are memory-mapped. `files.tables` copies parquet and tar files once into a memory-mapped table.
"""

import bisect
import io
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tables import map_table
from lit_efficient.files.tensors import map_tensors

Value = np.ndarray | int | float | str | bytes
"""Field of a row: an array, a number, a text, or bytes whose format the file does not state."""

UNSAFE = (".pt", ".pth", ".pkl", ".pickle", ".pyd", ".bin", ".ckpt")


def pickled(name: str) -> ConfigurationError:
    """Return the error that refuses pickled data."""
    return ConfigurationError(
        f"EncodedData: {name} is pickled, and reading a pickle runs the code that it names. Convert it once to "
        ".safetensors, on a machine where you trust the file."
    )


def locate(row: int, ends: Sequence[int]) -> tuple[int, int]:
    """Return the number of the file that holds a row, and the row's place in that file.

    Args:
        row: Row among the rows of all files.
        ends: Number of rows of the files up to and including each file.
    """
    number = bisect.bisect_right(ends, row)
    start = ends[number - 1] if number else 0
    return number, row - start


def array_of_bytes(data: bytes) -> Value:
    """Return the array that bytes in the format of .npy hold. Return other bytes unchanged.

    Raises:
        ConfigurationError: If the array holds Python objects or is damaged.
    """
    if not data.startswith(b"\x93NUMPY"):
        return data
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, MemoryError) as error:  # MemoryError: the header claims more numbers than fit into memory
        raise ConfigurationError(f"EncodedData: cannot read an array: {error}.") from error


class SafetensorsRows:
    """Rows of safetensors files. Each file holds the same fields, as tensors of equal length.

    Raises:
        ConfigurationError: If the files hold different fields, or the tensors of a file differ in length.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.fields: list[str] = []
        self._files = list(files)
        self._tensors: dict[tuple[int, str], Any] = {}
        lengths = []
        for path in files:
            # Only the header is read here. The tensors are mapped in the process that reads rows.
            with map_tensors(path) as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
            # A tensor without axes is a number about the file, and no field of its rows.
            rows = {name: shape[0] for name, shape in shapes.items() if shape}
            self.fields = self.fields or sorted(rows)
            if not rows or sorted(rows) != self.fields:
                raise ConfigurationError(
                    f"EncodedData: {path} holds the fields {', '.join(rows) or '(none)'}, and {files[0]} holds "
                    f"{', '.join(self.fields) or '(none)'}. All files must hold the same fields. Leave files out with "
                    "`files`."
                )
            if len(set(rows.values())) > 1:
                raise ConfigurationError(f"EncodedData: the tensors of {path} differ in length: {rows}.")
            lengths.append(rows[self.fields[0]])
        self._ends = list(accumulate(lengths))

    def __getstate__(self) -> dict[str, object]:
        # A memory map belongs to one process.
        return {**self.__dict__, "_tensors": {}}

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        number, inside = locate(row, self._ends)
        found: dict[str, Value] = {}
        for field in fields:
            if (number, field) not in self._tensors:
                self._tensors[number, field] = map_tensors(self._files[number]).get_tensor(field)
            tensor = self._tensors[number, field][inside]
            if tensor.is_floating_point():
                tensor = tensor.float()  # NumPy has no bfloat16
            array = tensor.numpy()
            found[field] = array if array.ndim else array.item()
        return found


class TableRows:
    """Rows of parquet or tar files.

    Raises:
        ConfigurationError: If the files cannot be read.
    """

    def __init__(self, layout: Literal["parquet", "webdataset"], files: Sequence[Path]) -> None:
        # flatten() makes "json.label" of the entry "label" of a .json file.
        self._rows = map_table("EncodedData", layout, files).flatten()
        self._strip = layout == "webdataset"  # a text file ends with a newline

    @property
    def fields(self) -> list[str]:
        return list(self._rows.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        found = {}
        for field in fields:
            if Path(field).suffix.lower() in UNSAFE:
                raise pickled(f"the file .{field}")
            scalar = self._rows.data.column(field)[row]
            if not scalar.is_valid:
                raise ConfigurationError(
                    f"EncodedData: row {row} has no {field!r}. Every row needs the fields that `fields` names."
                )
            value = _value_of(scalar)
            if self._strip and isinstance(value, str):
                value = value.strip()
            found[field] = value
        return found


def _value_of(scalar: Any) -> Value:
    """Return the value of an Arrow scalar: nested lists and bytes of an array become an array."""
    values = getattr(scalar, "values", None)
    if values is None:
        found: Value = scalar.as_py()
        if isinstance(found, bytes):
            return array_of_bytes(found)
        return found
    counts = []
    while "list" in str(values.type).split("<", maxsplit=1)[0]:
        counts.append(len(values))
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    counts.append(len(array))
    # A list of 4 lists that hold 128 lists with 4096 numbers in all has the counts [4, 128, 4096]: 4 x 32 x 32.
    shape = [counts[0]]
    for outer, inner in pairwise(counts):
        shape.append(inner // outer)
    return array.reshape(shape)

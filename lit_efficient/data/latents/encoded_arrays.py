"""Arrays whose first axis is the row, in safetensors, .npy and .npz files, read in place."""

import math
import re
import zipfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_efficient.data.latents.encoded_rows import Value, locate, pickled
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tensors import map_tensors


class ArrayFiles:
    """Arrays whose first axis is the row, in any number of files.

    A safetensors or .npz file holds a part of every field. A .npy file holds a part of the one that its folder is named
    after, or, right in the root, its own name up to a trailing number (``latents_003.npy``). Parts of the fields belong
    together by their files' paths in the fields' folders (by what follows in a name if all of a field begin with the
    same: ``latents/x/latents_3.npy``, ``labels/x/3.npy``). One file a row ([1, c, h, w]) is a part like any other.

    Args:
        root: The folder.
        files: Those in it, in order.

    Raises:
        ConfigurationError: If fields have parts of other names or lengths, or which belong together is unclear.
    """

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        found: dict[str, list[_Part]] = {}
        for path in files:
            for field, part in _OPENERS[path.suffix](root, path):
                found.setdefault(field, []).append(part)
        if not found:
            raise ConfigurationError(f"EncodedData: the files of {root} hold no arrays.")
        named = {field: _by_name(root, field, parts) for field, parts in found.items()}
        first, *others = named
        for other in others:
            rows = [{name: part.rows for name, part in named[field].items()} for field in (first, other)]
            if differing := sorted(rows[0].items() ^ rows[1].items()):
                raise ConfigurationError(
                    f"EncodedData: the fields {first!r} and {other!r} of {root} do not belong together row by row: "
                    f"file {differing[0][0]!r} has {differing[0][1]} rows of only one of them. `files` leaves others "
                    "out."
                )
        self._parts = {field: [parts[name].read for name in named[first]] for field, parts in named.items()}
        self._ends = list(accumulate(part.rows for part in named[first].values()))

    @property
    def fields(self) -> list[str]:
        """Names of tensors, folders or files."""
        return list(self._parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """A row of some arrays."""
        number, inside = locate(row, self._ends)
        return {field: plain(self._parts[field][number](inside)) for field in fields}


def plain(value: Any) -> Value:
    """An array as it is, one of a single text or number as such."""
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value


class _Safetensors:
    """One tensor of a safetensors file, by row; mapped in the process that reads."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._mapped: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}

    def __call__(self, row: int) -> Value:
        if self._mapped is None:
            self._mapped = map_tensors(self.path).get_tensor(self.name)  # nothing is read before it is looked at
        tensor = self._mapped[row]
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # NumPy knows no bfloat16


class _Mapped:
    """A .npy array in a file, from some byte on, by row."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.shape, self.order, self.dtype, self.offset = _header(path, start)

    def __call__(self, row: int) -> Value:
        whole = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, "F" if self.order else "C")
        return np.array(whole[row])


def _header(path: Path, start: int) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, Fortran order, dtype of an array, and where its numbers begin."""
    with path.open("rb") as file:
        file.seek(start)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, order, dtype = read(file)
        except Exception as error:  # of Python's own parser, too
            raise ConfigurationError(f"EncodedData: {path} holds no array ({error}).") from error
        if dtype.hasobject:
            raise pickled(path.name)
        if not shape:
            raise ConfigurationError(f"EncodedData: {path} holds a single number, not rows.")
        begin, end = file.tell(), path.stat().st_size
        if min(shape) < 0 or math.prod(shape) * dtype.itemsize > end - begin:
            raise ConfigurationError(f"EncodedData: {path} ends before its array of {shape} does.")
        return shape, order, dtype, begin


class _Part(NamedTuple):
    """Rows of a field in a file, whose path in the field's folder is ``folder / (prefix + number)``."""

    folder: str
    prefix: str
    number: str
    rows: int
    read: Callable[[int], Value]


def _by_name(root: Path, field: str, parts: Sequence[_Part]) -> dict[str, _Part]:
    """Parts of a field by the name that those of other fields have, too."""
    several = len({part.prefix for part in parts}) > 1
    named: dict[str, _Part] = {}
    for part in parts:
        name = f"{part.folder}/{part.prefix if several else ''}{part.number}".removeprefix("./")
        if name in named:
            raise ConfigurationError(
                f"EncodedData: several files of {root} hold a part {name!r} of the field {field!r}, so which labels "
                "are theirs is unclear. `files` leaves others out."
            )
        named[name] = part
    return named


def _safetensors_parts(root: Path, path: Path) -> list[tuple[str, _Part]]:
    with map_tensors(path) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    folder = path.parent.relative_to(root).as_posix()
    return [(n, _Part(folder, "", path.stem, shape[0], _Safetensors(path, n))) for n, shape in shapes.items() if shape]


def _npy_parts(root: Path, path: Path) -> list[tuple[str, _Part]]:
    mapped = _Mapped(path)
    inside = path.relative_to(root)
    prefix, number = re.fullmatch(r"(.*?)(\d*)", path.stem, re.DOTALL).groups()  # type: ignore[union-attr]
    if len(inside.parts) == 1:
        field = re.sub(r"[-_.]$", "", prefix) if number else prefix
        return [(field or path.stem, _Part(".", "", number, mapped.shape[0], mapped))]
    folder = inside.parent.relative_to(inside.parts[0]).as_posix()
    return [(inside.parts[0], _Part(folder, prefix, number, mapped.shape[0], mapped))]


def _npz_parts(root: Path, path: Path) -> list[tuple[str, _Part]]:
    parts: list[tuple[str, _Part]] = []
    folder = path.parent.relative_to(root).as_posix()
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ConfigurationError(
                    f"EncodedData: {path} is compressed, so no row of it can be read alone. Write it by np.savez."
                )
            file.seek(member.header_offset + 26)
            # Lengths of the name and of the extra field, then those, then the data.
            name, extra = np.frombuffer(file.read(4), "<u2").tolist()
            mapped = _Mapped(path, member.header_offset + 30 + name + extra)
            parts.append((Path(member.filename).stem, _Part(folder, "", path.stem, mapped.shape[0], mapped)))
    return parts


_OPENERS = {".safetensors": _safetensors_parts, ".npy": _npy_parts, ".npz": _npz_parts}

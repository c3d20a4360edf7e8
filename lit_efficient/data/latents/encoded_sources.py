"""Data sets that somebody else has encoded, in local folders: rows with named fields, whatever the files are.

    source.read(row, ["latents", "labels"]) -> {"latents": array, "labels": 402}

    arrays        .safetensors with tensors of equal length; .npy, a field a folder or file name; .npz, not compressed
    dataset_json  a .npy file a row, listed with its label in dataset.json (EDM2, REPA)
    mds           MosaicML streaming: index.json and .mds files (imagenet.int8)
    webdataset    .tar files, a sample the files of one name, a field each suffix
    parquet       columns of numbers, lists or bytes

Nothing is unpickled. Arrays and MDS are read in place, mapped into memory; tars and parquet from a mapped copy.

Costs: opening reads headers; tars and parquet are copied once, see `files.tables`
Source: https://huggingface.co/datasets/fal/cosmos-imagenet, https://github.com/cloneofsimo/imagenet.int8,
    https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lit_efficient.data.latents.encoded_mds import MosaicShards
from lit_efficient.data.latents.encoded_rows import UNSAFE, Value, locate, refusal, rows_in
from lit_efficient.data.latents.encoded_tables import TableRows
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tensors import map_tensors

Layout = Literal["auto", "arrays", "dataset_json", "mds", "webdataset", "parquet"]


class EncodedSource(Protocol):
    """Rows with named fields; can be pickled."""

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Some fields of a row, 0 <= row < len(self)."""


def open_encoded(
    folder: str | Path, layout: Layout = "auto", files: str = "*", without: str | None = None
) -> EncodedSource:
    """Open a folder of encoded data.

    Args:
        folder: Where it is.
        layout: How it is stored; ``auto`` is told by the files' names.
        files: Pattern for the names of the files that belong to it, such as ``imagenet_ci8x8.*``; of dataset_json, for
            those that are listed, of mds, for shards.
        without: Pattern for names of those that do not, or a folder whose files do not, relative to ``folder``.

    Raises:
        ConfigurationError: If there is nothing of the kind, or it cannot be read safely row by row.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigurationError(f"EncodedData: there is no folder {root}.")
    belongs = _belonging(root, files, without)
    found = sorted((path for path in root.rglob("*") if path.is_file() and belongs(path)), key=natural_order)
    chosen = f"match {files!r}" + ("" if without is None else f" and are not those of {without!r}")
    kinds = {kind: [path for path in found if path.suffix in suffixes] for kind, suffixes in _SUFFIXES.items()}
    if not any(kinds.values()) and (unsafe := [path for path in found if path.suffix in UNSAFE]):
        raise ConfigurationError(refusal(unsafe[0].name))
    if layout == "auto":
        if (root / "index.json").is_file():
            layout = "mds"
        elif (root / "dataset.json").is_file():
            layout = "dataset_json"
        else:
            several = [kind for kind, paths in kinds.items() if paths and kind != "mds"]
            if len(several) != 1:
                raise ConfigurationError(
                    f"EncodedData: {root} has files of {' and '.join(several) or 'no known layout'} (of those that "
                    f"{chosen}): give layout ({', '.join(_SUFFIXES)}) or another pattern for files."
                )
            layout = several[0]  # type: ignore[assignment]
    if layout == "mds":
        return MosaicShards(root, belongs)
    if layout == "dataset_json":
        return ListedFiles(root, belongs)
    if not kinds[layout]:
        raise ConfigurationError(
            f"EncodedData: {root} has no files of the layout {layout} ({', '.join(_SUFFIXES[layout])}) that {chosen}."
        )
    if layout in ("webdataset", "parquet"):
        return TableRows(layout, kinds[layout])
    return ArrayFiles(root, kinds[layout])


def _belonging(root: Path, files: str, without: str | None) -> Callable[[Path], bool]:
    """Which paths below a folder match ``files``, and neither match ``without`` nor lie in it."""
    if without is None:
        return lambda path: path.match(files)
    other = Path(os.path.abspath(root / Path(without).expanduser()))
    if other.is_dir():
        return lambda path: path.match(files) and not Path(os.path.abspath(path)).is_relative_to(other)
    return lambda path: path.match(files) and not path.match(without)


_SUFFIXES: dict[str, tuple[str, ...]] = {
    "arrays": (".safetensors", ".npy", ".npz"),
    "mds": (".mds",),
    "webdataset": (".tar",),
    "parquet": (".parquet",),
}


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Sorts 9.npy before 10.npy, folder by folder."""
    return [(int(p.isdigit()), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", path.as_posix()) if p]


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
        ConfigurationError: If fields have parts of other names or lengths, or which belong together cannot be told.
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
        self._ends = rows_in([part.rows for part in named[first].values()])

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


class ListedFiles:
    """Arrays of one row a file, as ``dataset.json`` lists them: {"labels": [["00000/img00000000.npy", 402], ...]}.

    Args:
        root: The folder.
        belongs: Which of them are its rows.
    """

    def __init__(self, root: Path, belongs: Callable[[Path], bool]) -> None:
        self._root, index = root, root / "dataset.json"
        try:
            self._listed = [(str(name), label) for name, label in json.loads(index.read_text("utf-8"))["labels"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"EncodedData: {index} lists no files with labels ({error!r}).") from error
        for name, _ in self._listed:
            if not name.endswith(".npy") or name.startswith("/") or ".." in name.split("/"):
                raise ConfigurationError(f"EncodedData: {index} lists {name!r}, which is no .npy file in it.")
        self._listed = [row for row in self._listed if belongs(root / row[0])]
        if not self._listed:
            raise ConfigurationError(f"EncodedData: {index} lists none of the files that are asked for.")

    @property
    def fields(self) -> list[str]:
        """``latents`` and ``labels``."""
        return ["latents", "labels"]

    def __len__(self) -> int:
        return len(self._listed)

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """A file's array, and its label."""
        name, label = self._listed[row]
        found: dict[str, Value] = {"labels": label}
        if "latents" in fields:
            try:
                found["latents"] = np.load(self._root / name, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"EncodedData: {self._root / name} cannot be read: {error}.") from error
        return {field: found[field] for field in fields}


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
        except ValueError as error:
            raise ConfigurationError(f"EncodedData: {path} holds no array ({error}).") from error
        if dtype.hasobject:
            raise ConfigurationError(refusal(path.name))
        if not shape:
            raise ConfigurationError(f"EncodedData: {path} holds a single number, not rows.")
        return shape, order, dtype, file.tell()


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
                "are theirs cannot be told. `files` leaves others out."
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
            file.seek(
                member.header_offset + 26
            )  # lengths of the name and of the extra field, then those, then the data
            name, extra = np.frombuffer(file.read(4), "<u2").tolist()
            mapped = _Mapped(path, member.header_offset + 30 + name + extra)
            parts.append((Path(member.filename).stem, _Part(folder, "", path.stem, mapped.shape[0], mapped)))
    return parts


_OPENERS = {".safetensors": _safetensors_parts, ".npy": _npy_parts, ".npz": _npz_parts}


def check_fields(source: EncodedSource, asked: Mapping[str, str], where: Path) -> None:
    """Refuse fields that a source has not.

    Args:
        source: The source.
        asked: Field by the argument that names it.
        where: For the error.

    Raises:
        ConfigurationError: Naming the fields that there are.
    """
    for argument, field in asked.items():
        if field not in source.fields:
            raise ConfigurationError(
                f"EncodedData: fields.{argument} is {field!r}, but {where} has {', '.join(map(repr, source.fields))}."
            )

"""Rows of tars, MDS shards, parquet files and data sets of the hub, one after another, without a copy or an index.

    row = place of its bytes, caption and label;   the bytes of an image are read when the image is needed

A tar is read as WebDataset: a sample is the neighbouring files with one name, and a field is a suffix (``jpg``,
``txt``, ``cls``, ``json.caption``). MDS is the format of MosaicML streaming. Nothing is unpickled and no code of a data
set is run.

Costs: a pass over a tar reads its headers, and of parquet files the row groups with rows of the part.
"""

import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lit_efficient.data.images.image_columns import (
    IMAGE_SUFFIXES,
    ImageColumns,
    bytes_of,
    chosen_column,
    image_column,
    tar_column,
)
from lit_efficient.data.latents.encoded_mds import MosaicShards, mosaic_files
from lit_efficient.errors import ConfigurationError, refusal

_VALUES = ("caption", "label", "weight")
_SUFFIXES = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)


@dataclass
class Row:
    """An image of a stream."""

    place: str  # for messages
    number: int  # in its shard
    read: Callable[[], bytes]  # returns the encoded image
    caption: object  # a text, or a list of several, if the row is right
    label: object
    weight: object
    beside: Mapping[str, Callable[[], bytes]]  # return the encoded mask and condition, if they were asked for


class Shard(Protocol):
    """Rows of one file, of which a part can be read alone."""

    name: str

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        """Yield all rows in order. Rows other than number ``first``, ``first + step``, ... may be None."""


def shards_of(name: str, split: str, columns: ImageColumns, beside: Mapping[str, str] = {}) -> list[Shard]:
    """Return the shards of a folder, a file or a data set of the hub, in the order of their names.

    Args:
        name: The folder, file or data set.
        split: Split to read, if there are several.
        columns: Names of the columns.
        beside: Columns of the ``mask`` and the ``condition``, if they are read.

    Raises:
        ConfigurationError: If there is nothing that can be streamed.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")):
            raise ConfigurationError(f"ImageData: no such folder or file: {name} (looked for {path.absolute()}).")
        return [HubShard(name, split, columns, beside)]
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        if (path / "index.json").is_file():
            return [MosaicShard(path, file, columns, beside) for file in mosaic_files(path, "ImageData")]
    kinds: dict[str, Any] = {".tar": TarShard, ".parquet": ParquetShard}
    found = {suffix: [file for file in files if file.suffix == suffix] for suffix in kinds}
    named = [suffix for suffix, listed in found.items() if listed]
    if len(named) != 1:
        raise ConfigurationError(
            f"ImageData: {name} holds {' and '.join(named) or 'no'} files that can be streamed. A stream reads .tar "
            "files (WebDataset), .parquet files, a folder of MDS with index.json, or a data set of the hub."
        )
    return [kinds[named[0]](file, columns, beside) for file in found[named[0]]]


class TarShard:
    """A tar of WebDataset."""

    def __init__(self, path: Path, columns: ImageColumns, beside: Mapping[str, str] = {}) -> None:
        self.name = str(path)
        self._path = path
        self._columns = columns
        self._beside = beside

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        for number, (key, fields) in enumerate(self._samples()):
            if number % step != first % step:
                yield None
                continue
            yield self._row(number, key, fields)

    def _samples(self) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """Yield key and fields of each sample. A field is the offset and the size of its bytes."""
        key = ""
        fields: dict[str, tuple[int, int]] = {}
        try:
            with tarfile.open(self._path, "r:") as opened:
                archive: Any = opened
                for member in archive:
                    archive.members = []  # a list of all would grow with the file
                    folder, _, file = member.name.rpartition("/")
                    stem, dot, suffix = file.partition(".")
                    if not member.isfile() or not stem or not dot:
                        continue
                    if member.issparse():
                        raise ConfigurationError(
                            f"ImageData: {member.name} in {self.name} is a sparse file; unpack it."
                        )
                    found = f"{folder}/{stem}"
                    if found != key and fields:
                        yield key, fields
                        fields = {}
                    key = found
                    fields[suffix.lower()] = (member.offset_data, member.size)
        except (OSError, tarfile.TarError) as error:
            raise ConfigurationError(f"ImageData: {self.name} cannot be read as a tar: {error}.") from error
        if fields:
            yield key, fields

    def _row(self, number: int, key: str, fields: dict[str, tuple[int, int]]) -> Row:
        place = f"{self.name}, {key.strip('/')}"
        notes: dict[str, Any] = {}
        for name, part in fields.items():
            if name == "json" or name.endswith(".json"):
                notes |= self._entries(place, *part)
        values = dict.fromkeys(fields) | notes
        wanted = self._columns.image
        image = next((name for name in fields if name in _SUFFIXES), None) if wanted == "auto" else wanted
        if image not in fields:
            raise ConfigurationError(
                f"ImageData: {place} has no image (columns.image: {wanted}). Its files end in {', '.join(fields)}."
            )
        found = {}
        for kind in _VALUES:
            column = tar_column(kind, getattr(self._columns, kind), list(values), place)
            found[kind] = self._value(column, fields, notes, place)
        caption, label = found["caption"], found["label"]
        if isinstance(label, str) and label.strip().isdigit():
            label = int(label)
        if isinstance(caption, str):
            caption = caption.strip()
        beside = {}
        for kind, wanted in self._beside.items():
            if wanted.lower() not in fields:
                raise ConfigurationError(
                    f"ImageData: {place} has no {kind} (train.{kind}: {wanted}). Its files end in {', '.join(fields)}."
                )
            beside[kind] = partial(_part_of_file, self._path, *fields[wanted.lower()])
        read = partial(_part_of_file, self._path, *fields[image])
        return Row(place, number, read, caption, label, found["weight"], beside)

    def _entries(self, place: str, offset: int, size: int) -> dict[str, Any]:
        try:
            found = json.loads(_part_of_file(self._path, offset, size))
        except ValueError as error:
            raise ConfigurationError(f"ImageData: {place} has a .json file that cannot be read: {error}.") from error
        if not isinstance(found, dict):
            return {}
        return {f"json.{name}": value for name, value in found.items()}

    def _value(self, name: str | None, fields: dict[str, tuple[int, int]], notes: dict[str, Any], place: str) -> Any:
        if name is None:
            return None
        if name in notes:
            return notes[name]
        try:
            return _part_of_file(self._path, *fields[name]).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"ImageData: {place}.{name} cannot be read as UTF-8 text: {error}.") from error


class ParquetShard:
    """A parquet file, of which one row group at a time is in memory."""

    def __init__(self, path: Path, columns: ImageColumns, beside: Mapping[str, str] = {}) -> None:
        import pyarrow.parquet

        self.name = str(path)
        self._path = path
        try:
            schema = pyarrow.parquet.read_schema(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigurationError(f"ImageData: {path} cannot be read as parquet: {error}.") from error
        names = list(schema.names)
        holding = [field.name for field in schema if _holds_bytes(field.type)]
        self._columns = _Columns.of(columns, beside, names, holding, self.name)

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        import pyarrow.parquet

        named = self._columns.named
        number = 0
        with pyarrow.parquet.ParquetFile(self._path, memory_map=True) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if not any(row % step == first % step for row in range(number, number + min(count, step))):
                    yield from [None] * count
                    number += count
                    continue
                table = file.read_row_group(group, columns=named)
                for inside in range(count):
                    if number % step != first % step:
                        yield None
                    else:
                        values = {name: table.column(name)[inside].as_py() for name in named}
                        place = f"{self.name}, row {number + 1}"
                        yield self._columns.row(place, number, values, partial(self._bytes, place, values))
                    number += 1

    def _bytes(self, place: str, values: dict[str, Any], column: str) -> bytes:
        return bytes_of(values[column], place, self._path.parent)


class MosaicShard:
    """A shard of a folder of MDS."""

    def __init__(self, folder: Path, file: str, columns: ImageColumns, beside: Mapping[str, str] = {}) -> None:
        self.name = str(folder / file)
        self._shards = MosaicShards(folder, lambda path: path == folder / file, "ImageData")
        names = self._shards.fields
        encodings = self._shards.encodings
        holding = [name for name, kind in encodings.items() if kind in ("jpeg", "png", "bytes")]
        self._columns = _Columns.of(columns, beside, names, holding, self.name)
        for column in self._columns.images:
            if column not in holding:
                raise refusal(
                    "ImageData", f"the encoding of {column!r} in {folder}", "jpeg, png or bytes", encodings[column]
                )

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        named = [name for name in self._columns.named if name not in self._columns.images]
        for number in range(len(self._shards)):
            if number % step != first % step:
                yield None
                continue
            values: dict[str, Any] = self._shards.read(number, named)
            place = f"{self.name}, row {number + 1}"
            yield self._columns.row(place, number, values, partial(self._shards.read_bytes, number))


class HubShard:
    """A data set of the hub, which `datasets` downloads while it is read."""

    def __init__(self, name: str, split: str, columns: ImageColumns, beside: Mapping[str, str] = {}) -> None:
        import datasets

        self.name = name
        self._columns = columns
        self._beside = beside
        try:
            self._rows: Any = datasets.load_dataset(name, split=split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:  # offline, not found, no such split, needs code
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(
                f"ImageData: {name} is neither a file or folder here, nor a data set of the hub that can be streamed: "
                f"{reason}"
            ) from error
        features = self._rows.features or {}
        for column, feature in features.items():
            if isinstance(feature, datasets.Image):
                self._rows = self._rows.cast_column(column, datasets.Image(decode=False))

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        for number, values in enumerate(self._rows):
            if number % step != first % step:
                yield None
                continue
            holding = [name for name, value in values.items() if isinstance(value, bytes | dict)]
            columns = _Columns.of(self._columns, self._beside, list(values), holding, self.name)
            place = f"{self.name}, row {number + 1}"
            yield columns.row(place, number, values, partial(_bytes_in, place, values))


def _bytes_in(place: str, values: Mapping[str, Any], column: str) -> bytes:
    content = values[column]
    if isinstance(content, dict):
        content = content.get("bytes")
    if not isinstance(content, bytes):
        raise ConfigurationError(
            f"ImageData: {place} holds no bytes of an image in {column!r}. Download the data set, and name its folder."
        )
    return content


@dataclass
class _Columns:
    """Columns of a table that are read; None for those that it does not have."""

    image: str
    caption: str | None
    label: str | None
    weight: str | None
    beside: dict[str, str]  # of the mask and the condition

    @classmethod
    def of(
        cls, wanted: ImageColumns, beside: Mapping[str, str], names: list[str], holding: list[str], where: str
    ) -> "_Columns":
        """Return the columns of a table with some names, of which ``holding`` may hold images."""
        for kind, name in beside.items():
            if name not in names:
                raise ConfigurationError(
                    f"ImageData: train.{kind} is {name!r}, but {where} has no such column. It has {', '.join(names)}."
                )
        left = [name for name in holding if name not in beside.values()]
        others = {kind: chosen_column(kind, getattr(wanted, kind), names, where) for kind in _VALUES}
        return cls(image_column(wanted.image, names, left, where), **others, beside=dict(beside))

    @property
    def images(self) -> list[str]:
        """Columns that hold encoded images."""
        return [self.image, *self.beside.values()]

    @property
    def named(self) -> list[str]:
        """All columns, each once."""
        values = [self.caption, self.label, self.weight]
        return list(dict.fromkeys([*self.images, *(name for name in values if name is not None)]))

    def row(self, place: str, number: int, values: Mapping[str, Any], read: Callable[[str], bytes]) -> Row:
        """Return a row with some values. ``read`` returns the encoded image in a column."""
        caption, label, weight = (values.get(name or "") for name in (self.caption, self.label, self.weight))
        beside = {kind: partial(read, name) for kind, name in self.beside.items()}
        return Row(place, number, partial(read, self.image), caption, label, weight, beside)


def _part_of_file(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

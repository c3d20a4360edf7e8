"""Rows of tars, MDS shards, parquet files and data sets of the hub, one after another, without a copy or an index.

    row = place of its bytes, caption and label;   the bytes of an image are read when the image is needed

A tar is read as WebDataset: a sample is the neighbouring files with one name, and a field is a suffix (``jpg``,
``txt``, ``cls``, ``json.caption``). MDS is the format of MosaicML streaming. Nothing is unpickled and no code of a data
set is run.

Costs: a pass over a tar reads its headers, and of parquet files the row groups with rows of the part.
"""

import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lit_efficient.data.images.image_columns import ImageColumns, bytes_of, chosen_column, image_column, tar_column
from lit_efficient.data.images.image_tables import IMAGE_SUFFIXES
from lit_efficient.data.latents.encoded_mds import MosaicShards, mosaic_files
from lit_efficient.errors import ConfigurationError

_SUFFIXES = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)


@dataclass
class Row:
    """An image of a stream."""

    place: str  # for messages
    number: int  # in its shard
    read: Callable[[], bytes]  # returns the encoded image
    caption: object  # a text, or a list of several, if the row is right
    label: object


class Shard(Protocol):
    """Rows of one file, of which a part can be read alone."""

    name: str

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        """Yield all rows in order. Rows other than number ``first``, ``first + step``, ... may be None."""


def shards_of(name: str, split: str, columns: ImageColumns) -> list[Shard]:
    """Return the shards of a folder, a file or a data set of the hub, in the order of their names.

    Raises:
        ConfigurationError: If there is nothing that can be streamed.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")):
            raise ConfigurationError(f"ImageData: no such folder or file: {name} (looked for {path.absolute()}).")
        return [HubShard(name, split, columns)]
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        if (path / "index.json").is_file():
            return [MosaicShard(path, file, columns) for file in mosaic_files(path, "ImageData")]
    kinds: dict[str, Any] = {".tar": TarShard, ".parquet": ParquetShard}
    found = {suffix: [file for file in files if file.suffix == suffix] for suffix in kinds}
    named = [suffix for suffix, listed in found.items() if listed]
    if len(named) != 1:
        raise ConfigurationError(
            f"ImageData: {name} holds {' and '.join(named) or 'no'} files that can be streamed. A stream reads .tar "
            "files (WebDataset), .parquet files, a folder of MDS with index.json, or a data set of the hub."
        )
    return [kinds[named[0]](file, columns) for file in found[named[0]]]


class TarShard:
    """A tar of WebDataset."""

    def __init__(self, path: Path, columns: ImageColumns) -> None:
        self.name = str(path)
        self._path = path
        self._columns = columns

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
        caption = self._value(tar_column("caption", self._columns.caption, list(values), place), fields, notes, place)
        label = self._value(tar_column("label", self._columns.label, list(values), place), fields, notes, place)
        if isinstance(label, str) and label.strip().isdigit():
            label = int(label)
        read = partial(_part_of_file, self._path, *fields[image])
        return Row(place, number, read, caption.strip() if isinstance(caption, str) else caption, label)

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

    def __init__(self, path: Path, columns: ImageColumns) -> None:
        import pyarrow.parquet

        self.name = str(path)
        self._path = path
        try:
            schema = pyarrow.parquet.read_schema(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigurationError(f"ImageData: {path} cannot be read as parquet: {error}.") from error
        names = list(schema.names)
        holding = [field.name for field in schema if _holds_bytes(field.type)]
        self._image = image_column(columns.image, names, holding, self.name)
        self._caption = chosen_column("caption", columns.caption, names, self.name)
        self._label = chosen_column("label", columns.label, names, self.name)

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        import pyarrow.parquet

        named = [name for name in (self._image, self._caption, self._label) if name is not None]
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
                        yield self._row(number, {name: table.column(name)[inside].as_py() for name in named})
                    number += 1

    def _row(self, number: int, values: dict[str, Any]) -> Row:
        place = f"{self.name}, row {number + 1}"
        content = bytes_of(values[self._image], place, self._path.parent)
        caption = values.get(self._caption or "")
        return Row(place, number, lambda: content, caption, values.get(self._label or ""))


class MosaicShard:
    """A shard of a folder of MDS."""

    def __init__(self, folder: Path, file: str, columns: ImageColumns) -> None:
        self.name = str(folder / file)
        self._shards = MosaicShards(folder, lambda path: path == folder / file, "ImageData")
        names = self._shards.fields
        encodings = self._shards.encodings
        holding = [name for name, kind in encodings.items() if kind in ("jpeg", "png", "bytes")]
        self._image = image_column(columns.image, names, holding, self.name)
        if self._image not in holding:
            raise ConfigurationError(
                f"ImageData: the column {self._image!r} of {folder} is encoded as {encodings[self._image]!r}, and must "
                "be jpeg, png or bytes."
            )
        self._caption = chosen_column("caption", columns.caption, names, self.name)
        self._label = chosen_column("label", columns.label, names, self.name)

    def rows(self, first: int, step: int) -> Iterator[Row | None]:
        named = [name for name in (self._caption, self._label) if name is not None]
        for number in range(len(self._shards)):
            if number % step != first % step:
                yield None
                continue
            values: dict[str, Any] = self._shards.read(number, named)
            read = partial(self._shards.read_bytes, number, self._image)
            caption = values.get(self._caption or "")
            yield Row(f"{self.name}, row {number + 1}", number, read, caption, values.get(self._label or ""))


class HubShard:
    """A data set of the hub, which `datasets` downloads while it is read."""

    def __init__(self, name: str, split: str, columns: ImageColumns) -> None:
        import datasets

        self.name = name
        self._columns = columns
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
            names = list(values)
            holding = [name for name, value in values.items() if isinstance(value, bytes | dict)]
            image = image_column(self._columns.image, names, holding, self.name)
            place = f"{self.name}, row {number + 1}"
            content = values[image]
            if isinstance(content, dict):
                content = content.get("bytes")
            if not isinstance(content, bytes):
                raise ConfigurationError(
                    f"ImageData: {place} holds no bytes of an image in {image!r}. Download the data set, and name its "
                    "folder."
                )
            caption = chosen_column("caption", self._columns.caption, names, self.name)
            label = chosen_column("label", self._columns.label, names, self.name)
            yield Row(place, number, partial(_itself, content), values.get(caption or ""), values.get(label or ""))


def _itself(content: bytes) -> bytes:
    return content


def _part_of_file(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

"""Rows of Hugging Face data sets on this disk and of parquet files, as encoded images with labels and captions.

The image column is an ``Image``, bytes, or {"bytes", "path"}. No code of a data set is run, and nothing is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.images.image_columns import (
    ImageColumns,
    bytes_of,
    check_caption,
    check_label,
    chosen_column,
    image_column,
)
from lit_efficient.errors import ConfigurationError


class SavedTable:
    """A Hugging Face data set on this disk.

    Args:
        path: a folder written by ``save_to_disk``, or of .arrow files, or one such file.
        split: which split.
        columns: as for :func:`open_table`.
        arrows: the .arrow files, if the folder is of them.
    """

    def __init__(self, path: Path, split: str, columns: ImageColumns, arrows: Sequence[Path] = ()) -> None:
        import datasets

        arrows = [path] if path.is_file() else arrows
        if arrows:
            self._rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in arrows])
        else:
            self._rows = datasets.load_from_disk(str(path))
        if isinstance(self._rows, dict):
            if split not in self._rows:
                raise ConfigurationError(f"ImageData: {path} has no split {split!r}; it has {', '.join(self._rows)}.")
            self._rows = self._rows[split]
        self.name = path.name
        features = self._rows.features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        self.image = image_column(columns.image, list(features), images, str(path))
        if isinstance(features[self.image], datasets.Image):
            self._rows = self._rows.cast_column(self.image, datasets.Image(decode=False))
        label, caption = (
            chosen_column(kind, getattr(columns, kind), list(features), str(path)) for kind in ("label", "caption")
        )
        self.labels, self.label_names, self.captions = None, None, None
        if label is not None:
            self.labels = [check_label(value, self.place(row), label) for row, value in enumerate(self._rows[label])]
            names = getattr(features[label], "names", None)
            self.label_names = list(names) if names else None
        if caption is not None:
            self.captions = [
                check_caption(value, self.place(row), caption) for row, value in enumerate(self._rows[caption])
            ]
        self._rows = self._rows.select_columns([self.image])
        self.files = [Path(entry["filename"]) for entry in self._rows.cache_files] + self._linked()
        self.note = f"{path}: {len(self)} rows, images: {self.image}, labels: {label or 'none'}, "
        self.note += f"captions: {caption or 'none'}"

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, row: int) -> str:
        """Its number, from 1."""
        return f"{self.name}, row {row + 1}"

    def read(self, row: int) -> bytes:
        """The image's bytes, or those of the file that the row names."""
        return bytes_of(self._rows[row][self.image], self.place(row))

    def _linked(self) -> list[Path]:
        """Files that rows name instead of holding their bytes."""
        import pyarrow
        from pyarrow import compute

        column = self._rows.data.column(self.image)
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index("path") < 0:
            return []
        absent = compute.is_null(compute.struct_field(column, "bytes"))
        paths = compute.filter(compute.struct_field(column, "path"), absent).to_pylist()
        return [Path(path) for path in paths if path]


class ParquetTable:
    """Parquet files. Their rows cannot be read one by one: ``BytesFile`` holds the images of an opened table.

    Args:
        root: what the user named.
        parquets: the files.
        columns: as for :func:`open_table`.
    """

    def __init__(self, root: Path, parquets: list[Path], columns: ImageColumns) -> None:
        import pyarrow
        from pyarrow import parquet

        self.name = root.name
        self.files = list(parquets)
        try:
            schema = parquet.read_schema(parquets[0])
            for file in parquets[1:]:
                if not parquet.read_schema(file).equals(schema):
                    raise ConfigurationError(f"ImageData: {file} has other columns than {parquets[0]}.")
            images = [field.name for field in schema if _holds_bytes(field.type)]
            self.image = image_column(columns.image, schema.names, images, str(root))
            if not _holds_bytes(schema.field(self.image).type):
                raise ConfigurationError(
                    f"ImageData: the column {self.image!r} of {root} must hold bytes or a struct with bytes, not "
                    f"{schema.field(self.image).type}."
                )
            label, caption = (
                chosen_column(kind, getattr(columns, kind), schema.names, str(root)) for kind in ("label", "caption")
            )
            table = parquet.read_table(parquets, columns=[name for name in (label, caption) if name])
            self._counts = [parquet.read_metadata(file).num_rows for file in parquets]
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigurationError(f"ImageData: {root} is no parquet that can be read: {error}") from error
        self.labels, self.label_names, self.captions = None, None, None
        if label is not None:
            values = table[label].to_pylist()
            self.labels = [check_label(value, self.place(row), label) for row, value in enumerate(values)]
            self.label_names = _names_in_schema(schema, label)
        if caption is not None:
            values = table[caption].to_pylist()
            self.captions = [check_caption(value, self.place(row), caption) for row, value in enumerate(values)]
        self.note = f"{root}: {len(self)} rows, images: {self.image}, labels: {label or 'none'}, "
        self.note += f"captions: {caption or 'none'}"

    def __len__(self) -> int:
        return sum(self._counts)

    def place(self, row: int) -> str:
        """File and number in it, from 1."""
        for file, count in zip(self.files, self._counts):
            if row < count:
                return f"{file}, row {row + 1}"
            row -= count
        raise IndexError(row)

    def read(self, row: int) -> bytes:
        """Not by number."""
        raise NotImplementedError("the images of a parquet file are read in order: stream()")

    def stream(self) -> Iterator[bytes]:
        """All encoded images in order, a few at a time in memory."""
        from pyarrow import parquet

        row = 0
        for file in self.files:
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=64, columns=[self.image], use_threads=False):
                    for value in batch.column(0).to_pylist():
                        yield bytes_of(value, self.place(row))
                        row += 1


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _names_in_schema(schema: Any, column: str) -> list[str] | None:
    """Class names that Hugging Face's ``datasets`` has written beside the columns."""
    try:
        info = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        names = info["names"] if info.get("_type") == "ClassLabel" else None
    except (KeyError, TypeError, ValueError):
        return None
    return list(names) if names else None

"""Rows of Hugging Face data sets on this disk, parquet among them, as encoded images with labels and captions.

The image column is an ``Image``, bytes, or {"bytes", "path"}. No code of a data set is run, and nothing is decoded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.images.image_columns import (
    ImageColumns,
    bytes_of,
    check_caption,
    check_label,
    chosen_column,
    file_in,
    image_column,
)
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.tables import map_table
from lit_efficient.internals.hugging_face import load_saved


class SavedTable:
    """A Hugging Face data set on this disk: a folder written by ``save_to_disk``, or of .arrow or .parquet files, or
    one file.
    """

    def __init__(
        self, path: Path, split: str, columns: ImageColumns, files: Sequence[Path] = (), cache_dir: str | None = None
    ) -> None:
        import datasets

        if files and files[0].suffix == ".parquet":
            self._rows = map_table("ImageData", "parquet", files, cache_dir)
        elif files:
            self._rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        else:
            self._rows = load_saved(path)
        if isinstance(self._rows, dict):
            if split not in self._rows:
                raise ConfigurationError(f"ImageData: {path} has no split {split!r}; it has {', '.join(self._rows)}.")
            self._rows = self._rows[split]
        self.name = path.name
        self._folder = path if path.is_dir() else path.parent
        features, types = self._rows.features, self._rows.data.schema
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        images = images or [field.name for field in types if _holds_bytes(field.type)]
        self.image = image_column(columns.image, list(features), images, str(path))
        if not _holds_bytes(types.field(self.image).type):
            raise ConfigurationError(
                f"ImageData: the column {self.image!r} of {path} must hold bytes or a struct with bytes, not "
                f"{types.field(self.image).type}."
            )
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
        self.files = list(files) or [Path(entry["filename"]) for entry in self._rows.cache_files]
        self.files += self._linked()
        self.note = f"{path}: {len(self)} rows, images: {self.image}, labels: {label or 'none'}, "
        self.note += f"captions: {caption or 'none'}"

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, row: int) -> str:
        """Its number, from 1."""
        return f"{self.name}, row {row + 1}"

    def read(self, row: int) -> bytes:
        """The image's bytes, or those of the file that the row names."""
        return bytes_of(self._rows[row][self.image], self.place(row), self._folder)

    def _linked(self) -> list[Path]:
        """Files that rows name instead of holding their bytes."""
        import pyarrow
        from pyarrow import compute

        column = self._rows.data.column(self.image)
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index("path") < 0:
            return []
        absent = compute.is_null(compute.struct_field(column, "bytes"))
        paths = compute.filter(compute.struct_field(column, "path"), absent).to_pylist()
        return [file_in(self._folder, path, self.name) for path in paths if path]


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

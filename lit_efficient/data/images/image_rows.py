"""Hugging Face data sets on the local disk, parquet files and tars, as encoded images with labels and captions.

The image column is an ``Image``, bytes, or {"bytes", "path"}. A tar is read as WebDataset: a sample is the files with
one name, and each suffix is a column (``jpg``, ``txt``, ``cls``; ``json.caption`` is an entry of a .json file).

No code of a data set is run, and nothing is decoded.
"""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.images.image_columns import (
    IMAGE_SUFFIXES,
    ImageColumns,
    Label,
    bytes_of,
    check_caption,
    check_label,
    check_weight,
    chosen_column,
    file_in,
    image_column,
    tar_column,
)
from lit_efficient.errors import ConfigurationError, listed
from lit_efficient.files.tables import map_table
from lit_efficient.internals.hugging_face import load_saved

_COMPARED = 5  # rows of a tar whose members `datasets` compares


class SavedTable:
    """Table of a Hugging Face data set on the local disk; an `ImageTable`.

    Args:
        path: Folder written by ``save_to_disk``, folder of .arrow, .parquet or .tar files, or one such
            file.
        split: Split to read, if the data set has several.
        columns: Names of the columns.
        files: The .arrow, .parquet or .tar files. Empty: the folder was written by ``save_to_disk``.
        cache_dir: Folder for the copy of parquet and tar files.
    """

    def __init__(
        self, path: Path, split: str, columns: ImageColumns, files: Sequence[Path] = (), cache_dir: str | None = None
    ) -> None:
        rows = _opened(path, split, files, cache_dir)
        names = list(rows.features)
        self.name = path.name
        self.image = _image_column(rows, columns.image, str(path))
        self.labels: list[Label] | None = None
        self.label_names: list[str] | None = None
        self.captions: list[list[str]] | None = None
        self.weights: list[float] | None = None
        is_tar = bool(files) and files[0].suffix == ".tar"
        label = chosen_column("label", columns.label, names, str(path))
        if label is not None:
            self.labels = [check_label(value, self.place(row), label) for row, value in enumerate(rows[label])]
            self.label_names = getattr(rows.features[label], "names", None)
        weight = chosen_column("weight", columns.weight, names, str(path))
        if weight is not None:
            self.weights = [check_weight(value, self.place(row), weight) for row, value in enumerate(rows[weight])]
        caption_column = tar_column if is_tar else chosen_column
        caption = caption_column("caption", columns.caption, names, str(path))
        if caption is not None:
            self.captions = [check_caption(value, self.place(row), caption) for row, value in enumerate(rows[caption])]
            if is_tar:  # a text file may begin with a byte order mark, and ends with a newline
                self.captions = [[text.removeprefix("\ufeff").strip() for text in texts] for texts in self.captions]
        self._folder = path if path.is_dir() else path.parent
        self._rows = _undecoded(rows, self.image)
        self.files = list(files) or [Path(entry["filename"]) for entry in self._rows.cache_files]
        self.files += self._linked_files()
        self.note = f"{path}: {len(self)} rows, images: {self.image}, labels: {label or 'none'}, "
        self.note += f"captions: {caption or 'none'}"

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, row: int) -> str:
        """Return the number of the row, counted from 1."""
        return f"{self.name}, row {row + 1}"

    def read(self, row: int) -> bytes:
        """Return the bytes of the image, or those of the file that the row names."""
        return bytes_of(self._rows[row][self.image], self.place(row), self._folder)

    def _linked_files(self) -> list[Path]:
        """Return the files that rows name instead of holding their bytes."""
        import pyarrow
        from pyarrow import compute

        column = self._rows.data.column(self.image)
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index("path") < 0:
            return []
        # Arrow finds these rows without loading the bytes of all others.
        absent = compute.is_null(compute.struct_field(column, "bytes"))
        paths = compute.filter(compute.struct_field(column, "path"), absent).to_pylist()
        return [file_in(self._folder, path, self.name) for path in paths if path]


def _opened(path: Path, split: str, files: Sequence[Path], cache_dir: str | None) -> Any:
    """Return the `datasets.Dataset` of a folder or of files."""
    import datasets

    if files and files[0].suffix == ".parquet":
        return map_table("ImageData", "parquet", files, cache_dir)
    if files and files[0].suffix == ".tar":
        for file in files:
            _check_members(file)
        rows = map_table("ImageData", "webdataset", files, cache_dir).flatten()  # makes json.caption of an entry
        return rows.remove_columns([name for name in ("__key__", "__url__") if name in rows.features])
    if files:
        return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    rows = load_saved(path)
    if isinstance(rows, dict):
        if split not in rows:
            raise ConfigurationError(
                f"ImageData: {path} has no split {split!r}. It has {', '.join(rows)}. Name one of them in splits."
            )
        return rows[split]
    return rows


def _check_members(file: Path) -> None:
    """Refuse a tar that is no WebDataset, but a packed folder.

    Its images are in several folders, whose names may be classes, or their rows have members of different types.
    """
    try:
        with tarfile.open(file) as archive:
            members = [Path(member.name) for member in archive if member.isfile()]
    except (OSError, tarfile.TarError) as error:
        raise ConfigurationError(f"ImageData: {file} cannot be read as a tar: {error}.") from error
    folders = {str(member.parent) for member in members}
    reason = f"holds the folders {listed(sorted(folders), 3)}, whose names may be classes" if len(folders) > 1 else ""
    rows: dict[str, list[str]] = {}
    for member in members:
        name, _, kind = member.name.partition(".")
        rows.setdefault(name, []).append(kind)
    images = {", ".join(sorted(kind for kind in row if f".{kind.lower()}" in IMAGE_SUFFIXES)) for row in rows.values()}
    kinds = {", ".join(sorted(row)) for row in list(rows.values())[:_COMPARED]}
    differing = max(images, kinds, key=len)
    if not reason and len(differing) > 1:
        reason = f"has rows of different types ({'; '.join(sorted(differing)[:3])}), which WebDataset does not allow"
    if reason:
        raise ConfigurationError(
            f"ImageData: {file} {reason}. Unpack it (mkdir {file.stem}; tar -xf {file.name} -C {file.stem}), and name "
            "the new folder."
        )


def _image_column(rows: Any, wanted: str, where: str) -> str:
    """Return the column that holds images."""
    import datasets

    types = rows.data.schema
    images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if not images:
        images = [field.name for field in types if _holds_bytes(field.type)]
    column = image_column(wanted, list(rows.features), images, where)
    kind = types.field(column).type
    if not _holds_bytes(kind):
        raise ConfigurationError(
            f"ImageData: the column {column!r} of {where} must hold bytes or a struct with bytes, not {kind}. Set "
            "columns.image."
        )
    return column


def _undecoded(rows: Any, column: str) -> Any:
    """Return a column of images as encoded bytes."""
    import datasets

    if isinstance(rows.features[column], datasets.Image):
        # Our own decoder applies the same rules to files and rows.
        rows = rows.cast_column(column, datasets.Image(decode=False))
    return rows.select_columns([column])


def _holds_bytes(kind: Any) -> bool:
    """Return whether an Arrow type is bytes, or a struct with bytes."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

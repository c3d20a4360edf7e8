"""A folder of image files, with labels and captions from subfolders, metadata files or the files beside them.

    <class>/<image>                   labels, if all images lie in subfolders
    metadata.jsonl or metadata.csv    Hugging Face's ImageFolder: file_name, relative to its folder, and columns
    <image>.txt or <image>.caption    captions, as kohya's scripts have them

One subfolder alone, over all folders that are used together, is no class.
"""

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.images.image_columns import AUTO, ImageColumns, check_caption, check_label, chosen_column
from lit_efficient.errors import ConfigurationError

CAPTION_SUFFIXES = (".txt", ".caption")
_METADATA = ("metadata.jsonl", "metadata.csv")


class FolderTable:
    """Files in a folder; the metadata file of the folder of all splits, ``above`` it, may list the images of
    ``others``, too.
    """

    def __init__(
        self,
        root: Path,
        images: list[Path],
        columns: ImageColumns,
        above: Path | None = None,
        others: Sequence[Path] = (),
    ) -> None:
        self.name = root.name
        self.image = ""
        self.labels: list[Any] | None = None
        self.label_names: list[str] | None = None
        self.by_subfolder = False
        self.captions: list[str] | None = None
        metadata = [file for folder in {root, *(image.parent for image in images)} for file in _metadata_of(folder)]
        metadata += [] if above is None else _metadata_of(above)
        self._root = root
        self._others = {os.path.normpath(path) for path in others}
        self._paths = sorted(images, key=Path.as_posix)
        notes = [self._from_metadata(sorted(metadata), columns)] if metadata else self._from_names(columns)
        self.files = self._paths
        self.note = f"{root}: {len(self)} images{''.join(f', {note}' for note in notes)}"

    def __len__(self) -> int:
        return len(self._paths)

    def place(self, row: int) -> str:
        """The file's path."""
        return str(self._paths[row])

    def read(self, row: int) -> bytes:
        """The file's content."""
        try:
            return self._paths[row].read_bytes()
        except OSError as error:
            raise ConfigurationError(f"ImageData: {self._paths[row]} cannot be read: {error}.") from error

    def _from_metadata(self, metadata: list[Path], columns: ImageColumns) -> str:
        rows = [(place, file.parent, row) for file in metadata for place, row in _metadata_rows(file)]
        names = list(dict.fromkeys(key for _, _, row in rows for key in row))
        where = " and ".join(str(file) for file in metadata)
        if "file_name" not in names:
            raise ConfigurationError(
                f"ImageData: {where} has no column file_name; its columns are {', '.join(names) or 'none'}."
            )
        label, caption = (chosen_column(kind, getattr(columns, kind), names, where) for kind in ("label", "caption"))
        listed, there = {}, {os.path.normpath(path): path for path in self._paths}
        for place, folder, row in rows:
            name = os.path.normpath(folder / str(row["file_name"])) if row.get("file_name") else ""
            if name in self._others:
                continue
            path = there.get(name)
            if path is None:
                raise ConfigurationError(f"ImageData: {place}: there is no image {row.get('file_name')!r}.")
            if path in listed:
                raise ConfigurationError(f"ImageData: {place}: the image {row['file_name']!r} is listed twice.")
            listed[path] = (place, row)
        if not listed:
            raise ConfigurationError(f"ImageData: {where} lists no image of {self._root}.")
        left_out = len(self._paths) - len(listed)
        self._paths = [path for path in self._paths if path in listed]
        rows_of = [listed[path] for path in self._paths]
        self.labels = None if label is None else [check_label(row.get(label), place, label) for place, row in rows_of]
        self.captions = None if caption is None else [check_caption(row.get(caption), p, caption) for p, row in rows_of]
        note = f"labels: {label or 'none'}, captions: {caption or 'none'} of {where}"
        return note + (f"; {left_out} images that it does not list are left out" if left_out else "")

    def _from_names(self, columns: ImageColumns) -> list[str]:
        for kind in ("label", "caption"):
            if getattr(columns, kind) not in (None, AUTO):
                raise ConfigurationError(
                    f"ImageData: columns.{kind} is {getattr(columns, kind)!r}, but {self._root} holds no "
                    "metadata.jsonl or metadata.csv with columns."
                )
        notes = []
        inside = [path.parts[len(self._root.parts) :] for path in self._paths]
        classes = {parts[0] for parts in inside}
        if columns.label is not None and all(len(parts) > 1 for parts in inside):
            self.labels = [parts[0] for parts in inside]
            self.by_subfolder = True
            notes.append(f"labels: its {len(classes)} subfolders" if len(classes) > 1 else "one subfolder")
        captions = _sidecars(self._paths) if columns.caption is not None else {}
        missing = [path for path, file in captions.items() if file is None]
        if captions and len(missing) < len(captions):
            if missing:
                raise ConfigurationError(
                    f"ImageData: {len(missing)} of {len(captions)} images have no caption beside them, the first is "
                    f"{missing[0]}. Write them (an empty file is an empty caption), or set columns.caption: null."
                )
            sidecars = [file for file in captions.values() if file is not None]
            self.captions = [" ".join(_text_of(file).split()) for file in sidecars]
            notes.append(f"captions: the {sidecars[0].suffix} files beside them")
        return notes


def _metadata_of(folder: Path) -> list[Path]:
    found = [folder / name for name in _METADATA if (folder / name).is_file()]
    if len(found) > 1:
        raise ConfigurationError(f"ImageData: {folder} holds {' and '.join(_METADATA)}: leave one of them.")
    return found


def _metadata_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text_of(file)
    if file.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        for row in reader:
            yield f"{file}, line {reader.line_num}", row
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: it takes U+2028 and others for ends of lines
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"ImageData: {file}, line {number} is no JSON: {error}.") from error
        if not isinstance(parsed, dict):
            raise ConfigurationError(f"ImageData: {file}, line {number} is no JSON object.")
        yield f"{file}, line {number}", parsed


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")  # ends of lines as they are
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"ImageData: {file} is no UTF-8 text that can be read: {error}.") from error


def _sidecars(images: Sequence[Path]) -> dict[Path, Path | None]:
    """The caption file beside each image; folders are listed once."""
    beside = {folder: set(os.listdir(folder)) for folder in {image.parent for image in images}}
    return {image: _sidecar(image, beside[image.parent]) for image in images}


def _sidecar(image: Path, names: set[str]) -> Path | None:
    found = (image.with_suffix(suffix) for suffix in CAPTION_SUFFIXES if image.stem + suffix in names)
    return next((file for file in found if file.is_file()), None)

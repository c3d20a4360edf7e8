"""Folders, Hugging Face data sets and parquet files as one thing: encoded images by number, with labels and captions.

Rows are numbered in an order that depends on names alone.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_folder import FolderTable
from lit_efficient.data.images.image_rows import SavedTable
from lit_efficient.errors import ConfigurationError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
}


@dataclass(frozen=True)
class ImageSplits:
    """Names of splits, of data sets that have several.

    Args:
        train: Split to train on.
        val: Split for validation.
        test: Split for the test.
    """

    train: str = "train"
    val: str = "validation"
    test: str = "test"


class ImageTable(Protocol):
    """Encoded images by number. It can be pickled, forked and read by several processes."""

    name: str
    image: str
    """Column of the images; "" for files."""
    files: list[Path]
    """All files that hold images, or name them."""
    labels: list[Any] | None
    """Integers or strings."""
    label_names: list[str] | None
    """What integers stand for, where that is said."""
    captions: list[str] | None
    note: str
    """What was recognised, in a sentence."""

    def __len__(self) -> int:
        """Number of images."""

    def place(self, row: int) -> str:
        """Where to find an image again."""

    def read(self, row: int) -> bytes:
        """An encoded image."""


def open_table(name: str, split: str, columns: ImageColumns, cache_dir: str | None = None) -> ImageTable:
    """Find what a name in a config stands for.

    Raises:
        ConfigurationError: If there is no such thing, nothing in it, or a column is missing.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in (".parquet", ".arrow"):
        return SavedTable(path, split, columns, [path], cache_dir)
    if path.is_file():
        raise ConfigurationError(f"ImageData: {name} is a file that is neither .parquet nor .arrow: name its folder.")
    if not path.is_dir():
        raise ConfigurationError(f"ImageData: no such folder or file: {name} (looked for {path.absolute()}).")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return SavedTable(path, split, columns)
    found = _files_in(path)
    images = [file for file in found if file.suffix.lower() in IMAGE_SUFFIXES]
    tables = {suffix: [file for file in found if file.suffix == suffix] for suffix in (".parquet", ".arrow")}
    kinds = [kind for kind, files in (("images", images), *tables.items()) if files]
    if not kinds:
        listed = ", ".join(IMAGE_SUFFIXES)
        raise ConfigurationError(f"ImageData: the folder {name} holds no image ({listed}), .parquet or .arrow file.")
    if len(kinds) > 1:
        raise ConfigurationError(f"ImageData: the folder {name} holds {' and '.join(kinds)}: name one of them.")
    if images:
        top = {image.parts[len(path.parts)] for image in images}
        if all(_split_of(name) for name in top):  # train/, validation/: no classes
            chosen = [name for name in sorted(top) if _split_of(name) == (_split_of(split) or split)]
            if len(chosen) != 1:
                raise ConfigurationError(
                    f"ImageData: {name} has {', '.join(sorted(top))}: no single one of them is the split {split!r}."
                )
            inside = path / chosen[0]
            others = [image for image in images if inside not in image.parents]
            images = [image for image in images if inside in image.parents]
            return FolderTable(inside, images, columns, path, others)
        return FolderTable(path, images, columns)
    files = _of_split(path, tables[kinds[0]], split)
    return SavedTable(path, split, columns, files, cache_dir)


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, in an order that does not depend on the file system.

    Links to folders are followed, but for those to a folder that they lie in.
    """
    found = []
    above = {os.fspath(folder): {os.path.realpath(folder)}}  # real paths of a folder and of those it is in
    for here, below, names in os.walk(folder, followlinks=True):
        around, followed = above.pop(here), []
        for name in below:
            inside = os.path.join(here, name)
            real = os.path.realpath(inside) if os.path.islink(inside) else inside
            if not name.startswith(".") and real not in around:
                above[inside] = {*around, os.path.realpath(inside)}
                followed.append(name)
        below[:] = followed
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _split_of(name: str) -> str | None:
    return next((split for split, words in _SPLITS.items() if name.lower() in words), None)


def _of_split(root: Path, files: list[Path], split: str) -> list[Path]:
    """Those of a split, if file or folder names tell (``train-00000-of-00002.parquet``); else all."""

    def split_by_name(file: Path) -> str | None:
        words = re.split(r"[-_./]", file.relative_to(root).as_posix())
        return next((split for word in words if (split := _split_of(word))), None)

    splits = {file: split_by_name(file) for file in files}
    if not any(splits.values()):
        return files
    chosen = [file for file in files if splits[file] == (_split_of(split) or split)]
    if not chosen:
        there = ", ".join(sorted({name for name in splits.values() if name}))
        raise ConfigurationError(f"ImageData: {root} has no files of split {split!r}; it has {there}.")
    return chosen

"""Folders, Hugging Face data sets, parquet files and tars as tables of encoded images, with labels and captions.

The order of the rows depends on names alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_efficient.data.images.image_columns import IMAGE_SUFFIXES, ImageColumns, Label
from lit_efficient.data.images.image_folder import ENDINGS, FolderTable, companions, files_in, is_label
from lit_efficient.data.images.image_rows import SavedTable
from lit_efficient.data.images.image_set import ImageSet
from lit_efficient.errors import ConfigurationError, checks_types

_UNREAD = (".heic", ".heif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".psd")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
}


@checks_types
@dataclass(frozen=True)
class ImageSplits:
    """Names of the splits of data sets that have several.

    Args:
        train: Split for training.
        val: Split for validation.
        test: Split for the test.
    """

    train: str = "train"
    val: str = "validation"
    test: str = "test"


class ImageTable(Protocol):
    """Encoded images by number. A table can be pickled, forked and read by several processes."""

    name: str
    image: str
    """Column of the images; "" for files."""
    files: list[Path]
    """All files that hold images or name them."""
    labels: list[Label] | None
    label_names: list[str] | None
    """Names of labels that are numbers, if the data set states them."""
    captions: list[list[str]] | None
    """Captions of each image."""
    weights: list[float] | None
    """Weight of each image in the loss."""
    note: str
    """Sentence that says what was recognised."""

    def __len__(self) -> int:
        """Return the number of images."""

    def place(self, row: int) -> str:
        """Return the path or the row of an image, for messages."""

    def read(self, row: int) -> bytes:
        """Return an encoded image."""


def open_table(about: ImageSet, split: str, columns: ImageColumns, cache_dir: str | None = None) -> ImageTable:
    """Open the table of the images of a set.

    Args:
        about: The set. Its images are a folder or a file.
        split: Split to read, if there are several.
        columns: Names of the columns.
        cache_dir: Folder for the copy of parquet files.

    Raises:
        ConfigurationError: If there is no such table, it is empty, or a column is missing.
    """
    name = str(about.images)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in (".parquet", ".arrow", ".tar"):
        return SavedTable(path, split, columns, [path], cache_dir)
    if path.is_file():
        packed = name.lower().endswith((".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar"))
        advice = "Unpack it, and name the folder" if packed else "Name its folder"
        raise ConfigurationError(f"ImageData: {name} is a file that is neither .parquet, .arrow nor .tar. {advice}.")
    if not path.is_dir():
        raise ConfigurationError(f"ImageData: no such folder or file: {name} (looked for {path.absolute()}).")
    # These folders also hold .arrow files, so they must be recognised first.
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return SavedTable(path, split, columns)
    files = [file for file in files_in(path) if not _belongs_to_set(file, about)]
    found = {"images": [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]}
    if about.generate is not None:
        # The folder may hold more, from a run that asked for more.
        found["images"] = found["images"][: about.generate.number]
    for suffix in (".parquet", ".arrow", ".tar"):
        found[suffix] = [file for file in files if file.suffix == suffix]
    kinds = [kind for kind, listed in found.items() if listed]
    others = [file for file in files if file.suffix.lower() in _UNREAD]
    remark = ""
    if others:
        first = others[0].relative_to(path)
        remark = (
            f"{len(others)} images, the first is {first}, have formats that are not read. Convert them to .jpg or .png"
        )
    if not kinds:
        suffixes = ", ".join(IMAGE_SUFFIXES)
        raise ConfigurationError(
            f"ImageData: the folder {name} holds no image ({suffixes}), .parquet, .arrow or .tar file. {remark}".strip()
        )
    if remark:
        rank_zero_warn(f"ImageData: left out: {remark}")
    if len(kinds) > 1:
        raise ConfigurationError(f"ImageData: the folder {name} holds {' and '.join(kinds)}. Name one kind of files.")
    if kinds[0] == "images":
        return _open_images(path, _without_labels(found["images"], about), split, columns, about)
    return SavedTable(path, split, columns, _of_split(path, found[kinds[0]], split), cache_dir)


def open_companions(
    table: ImageTable, kind: str, named: str, about: ImageSet, split: str, columns: ImageColumns, cache_dir: str | None
) -> ImageTable:
    """Open the masks or the conditions of the images of a table, in their order.

    Args:
        table: The images.
        kind: ``mask`` or ``condition``.
        named: Where they are, as the set says.
        about: The set.
        split: Split of the table.
        columns: Columns of the table.
        cache_dir: Folder for the copy of parquet files.

    Raises:
        ConfigurationError: If an image has none.
    """
    if isinstance(table, FolderTable):
        return companions(table, kind, named, IMAGE_SUFFIXES)
    return open_table(about, split, replace(columns, image=named, label=None, caption=None, weight=None), cache_dir)


def _belongs_to_set(file: Path, about: ImageSet) -> bool:
    """Return whether a file is in the folder of the masks, conditions or captions of a set."""
    named = [name for name in (about.mask, about.condition, about.captions) if name is not None]
    # One of them may be relative, and the other not.
    folders = [Path(name).expanduser().absolute() for name in named]
    root = Path(str(about.images)).expanduser().absolute()
    return any(folder != root and folder in file.absolute().parents for folder in folders)


def _without_labels(images: list[Path], about: ImageSet) -> list[Path]:
    """Return images without the masks and conditions beside them.

    Raises:
        ConfigurationError: If the set does not say what these are for.
    """
    kept = [image for image in images if not is_label(image)]
    for ending, kind in ENDINGS.items():
        beside = [image for image in images if image.stem.endswith(f"-{ending}")]
        if kept and beside and getattr(about, kind) != ending:
            raise ConfigurationError(
                f"ImageData: {about.images} holds {len(beside)} files like {beside[0].name}, which would be trained on "
                f"as images. Name the folder as a set, {{images: {about.images}, {kind}: {ending}}}, or move them."
            )
    return kept or images


def _open_images(path: Path, images: list[Path], split: str, columns: ImageColumns, about: ImageSet) -> FolderTable:
    """Return the table of a folder, or of one of its subfolders if their names are those of splits."""
    # Folders named train/ and validation/ are splits and no classes.
    top = sorted({image.parts[len(path.parts)] for image in images})
    if not all(_split_of(name) for name in top):
        return FolderTable(path, images, columns, about)
    chosen = [name for name in top if _split_of(name) == (_split_of(split) or split)]
    if len(chosen) != 1:
        raise ConfigurationError(
            f"ImageData: {path} has {', '.join(top)}: not exactly one of them is the split {split!r}. Set splits."
        )
    folder = path / chosen[0]
    own = [image for image in images if folder in image.parents]
    others = [image for image in images if folder not in image.parents]
    return FolderTable(folder, own, columns, about, path, others)


def _split_of(name: str) -> str | None:
    """Return the split that a word names, or None."""
    for split, words in _SPLITS.items():
        if name.lower() in words:
            return split
    return None


def _of_split(root: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files of a split by their names (``train-00000-of-00002.parquet``); all if no name has a split."""
    splits = {}
    for file in files:
        words = re.split(r"[-_./]", file.relative_to(root).as_posix())
        named = [_split_of(word) for word in words if _split_of(word)]
        splits[file] = named[0] if named else None
    if not any(splits.values()):
        return list(files)
    chosen = [file for file in files if splits[file] == (_split_of(split) or split)]
    if not chosen:
        there = ", ".join(sorted({name for name in splits.values() if name}))
        raise ConfigurationError(f"ImageData: {root} has no files of split {split!r}. It has {there}. Set splits.")
    return chosen

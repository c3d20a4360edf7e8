"""Columns of images, labels and captions in a table: which columns they are, and checks of their values."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_efficient.errors import ConfigurationError, checks_types, refusal

AUTO = "auto"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
Label = int | str
_JSON = "json."  # of columns that are entries of a .json file in a tar
Subfolders = Literal["auto", "classes", "repeats"]
_USUAL = {
    "image": ("image", "img", "picture", "jpg", "png"),
    "label": ("label", "labels", "class", "category", "cls"),
    "caption": ("text", "caption", "captions", "prompt", "txt"),
}


@checks_types
@dataclass(frozen=True)
class ImageColumns:
    """Names of columns.

    Args:
        image: Column of the images. ``auto``: the only column that holds images, or the one with a usual name.
        label: Column of the labels, which are numbers or names. ``auto``: the column with a usual name, or the
            subfolders. null: no labels.
        caption: Column of the captions. ``auto``: the column with a usual name, or the .txt files. null: no captions.
        weight: Column of the weights of training images in the loss, numbers from 0. null: all are 1.
        subfolders: Meaning of the subfolders of a folder of images. ``classes``: their names are labels. ``repeats``:
            they are named ``10_cat`` as for kohya's scripts: an epoch shows each image 10 times, ``cat`` is the
            caption of images without a .txt file, and there are no labels. ``auto``: repeats if all names are like
            that (``0_cat`` and ``01_cat`` are not), else classes.
    """

    image: str = AUTO
    label: str | None = AUTO
    caption: str | None = AUTO
    weight: str | None = None
    subfolders: Subfolders = "auto"


def chosen_column(kind: str, wanted: str | None, names: Sequence[str], where: str) -> str | None:
    """Return the column that the user named, or with ``auto`` the first column with a usual name.

    Args:
        kind: ``image``, ``label``, ``caption`` or another column, which is never ``auto``.
        wanted: Name of the column, ``auto``, or None for no column.
        names: All columns of the table.
        where: The table, for errors.

    Raises:
        ConfigurationError: If the named column does not exist.
    """
    if wanted is None:
        return None
    if wanted == AUTO:
        return next((name for name in _USUAL[kind] if name in names), None)
    if wanted not in names:
        raise ConfigurationError(
            f"ImageData: columns.{kind} is {wanted!r}, but {where} has no such column. It has {', '.join(names)}."
        )
    return wanted


def tar_column(kind: str, wanted: str | None, names: Sequence[str], where: str) -> str | None:
    """Return a column of a tar as :func:`chosen_column` does. ``auto`` also finds a usual name in a .json file."""
    found = chosen_column(kind, wanted, names, where)
    if found is None and wanted == AUTO:
        entries = [name.removeprefix(_JSON) for name in names if name.startswith(_JSON)]
        entry = chosen_column(kind, wanted, entries, where)
        found = None if entry is None else _JSON + entry
    return found


def image_column(wanted: str, names: Sequence[str], holding: Sequence[str], where: str) -> str:
    """Return the column of images: the named one, the only one that holds bytes or images, or one with a usual name.

    Args:
        wanted: Name of the column, or ``auto``.
        names: All columns of the table.
        holding: Columns that hold bytes or images.
        where: The table, for errors.

    Raises:
        ConfigurationError: If there is no such column, or several columns may hold the images.
    """
    # The types say more than the names: a column "image" may hold paths.
    if wanted == AUTO and len(holding) == 1:
        return holding[0]
    if wanted == AUTO and holding:
        names = holding
    found = chosen_column("image", wanted, names, where)
    if found is None:
        raise ConfigurationError(
            f"ImageData: cannot tell which column of {where} holds the images. Set columns.image to one of "
            f"{', '.join(names)}."
        )
    return found


def file_in(folder: Path, path: str, place: str) -> Path:
    """Return the file that a row names, in the folder of its data set.

    Raises:
        ConfigurationError: If the file is outside the folder: a foreign data set could make us read any file.
    """
    # normpath resolves ".." without following links, which the owner of the folder may have made.
    inside = os.path.abspath(folder)
    file = Path(os.path.normpath(os.path.join(inside, path)))
    if not file.is_relative_to(inside):
        raise ConfigurationError(
            f"ImageData: {place} names the image {path}, which is not in {folder}. Store the images in the rows, with "
            "save_to_disk or to_parquet of datasets."
        )
    return file


def bytes_of(value: object, place: str, folder: Path) -> bytes:
    """Return the encoded image in a cell: bytes, or {"bytes", "path"}, of which one may be missing.

    Args:
        value: The cell.
        place: Place of the cell, for errors.
        folder: Folder of the data set, in which the path is.

    Raises:
        ConfigurationError: If the cell holds no image.
    """
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes")
        if value is None and path:
            try:
                return file_in(folder, path, place).read_bytes()
            except OSError as error:
                raise ConfigurationError(f"ImageData: {place}: its image {path} cannot be read: {error}.") from error
    if not isinstance(value, bytes):
        raise ConfigurationError(
            f"ImageData: {place} holds no encoded image but a {type(value).__name__}. An image column holds bytes, or "
            "{'bytes', 'path'}."
        )
    return value


def check_label(value: object, place: str, column: str) -> Label:
    """Return a label: a number that is not negative, or a name.

    Raises:
        ConfigurationError: If it is neither.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_number and (not isinstance(value, str) or value == ""):
        raise refusal(f"ImageData: {place}", f"the label in {column!r}", "a number from 0 or a name", value)
    return value  # type: ignore[return-value]


def check_weight(value: object, place: str, column: str) -> float:
    """Return a weight in the loss. It may be a text, as a .csv file has it.

    Raises:
        ConfigurationError: If it is no number from 0.
    """
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise refusal(f"ImageData: {place}", f"the weight in {column!r}", "a number from 0", value)
    return found


def check_caption(value: object, place: str, column: str) -> list[str]:
    """Return the captions of an image: one text, which may be empty, or a list of several.

    Raises:
        ConfigurationError: If it is neither.
    """
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise refusal(f"ImageData: {place}", f"the caption in {column!r}", "a text, or a list of texts", value)
    return found

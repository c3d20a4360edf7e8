"""Which columns hold images, labels and captions, and what may stand in them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError, refusal

AUTO = "auto"
USUAL = {
    "image": ("image", "img", "picture", "jpg", "png"),
    "label": ("label", "labels", "class", "category"),
    "caption": ("text", "caption", "captions", "prompt"),
}


@dataclass(frozen=True)
class ImageColumns:
    """Names of columns.

    Args:
        image: Column of the images; ``auto`` is the only one that holds some, or the usual name.
        label: Column of the labels, numbers or names; ``auto`` is the usual name, or subfolders; null is none.
        caption: Column of the captions; ``auto`` is the usual name, or .txt files; null is none.
    """

    image: str = AUTO
    label: str | None = AUTO
    caption: str | None = AUTO


def chosen_column(kind: str, wanted: str | None, names: Sequence[str], where: str) -> str | None:
    """The column of labels or captions: the one asked for, or the first of the usual ones that is there.

    Raises:
        ConfigurationError: If the one asked for is missing.
    """
    if wanted is None:
        return None
    if wanted == AUTO:
        return next((name for name in USUAL[kind] if name in names), None)
    if wanted not in names:
        raise ConfigurationError(
            f"ImageData: columns.{kind} is {wanted!r}, but {where} has no such column; it has {', '.join(names)}."
        )
    return wanted


def image_column(wanted: str, names: Sequence[str], holding: Sequence[str], where: str) -> str:
    """The column of images: the one asked for, the only one that holds bytes or images, or the usual one.

    Raises:
        ConfigurationError: If there is none, or which one is unclear.
    """
    if wanted != AUTO:
        return str(chosen_column("image", wanted, names, where))
    if len(holding) == 1:
        return holding[0]
    usual = chosen_column("image", AUTO, holding or names, where)
    if usual is None:
        raise ConfigurationError(
            f"ImageData: which column of {where} holds the images? Set columns.image; it has {', '.join(names)}."
        )
    return usual


def file_in(folder: Path, path: str, place: str) -> Path:
    """The file in a data set's folder that a row names.

    Raises:
        ConfigurationError: If it lies elsewhere: a data set of somebody else's would have any file read.
    """
    inside = os.path.abspath(folder)
    file = Path(os.path.normpath(os.path.join(inside, path)))
    if not file.is_relative_to(inside):
        raise ConfigurationError(
            f"ImageData: {place} names the image {path}, which is not in {folder}. Images that lie elsewhere are put "
            "into the rows by save_to_disk and to_parquet of datasets."
        )
    return file


def bytes_of(value: Any, place: str, folder: Path) -> bytes:
    """The encoded image in a cell: bytes, or {"bytes", "path"} of which one may be missing; the path is in a folder.

    Raises:
        ConfigurationError: If there is none.
    """
    if isinstance(value, dict):
        content, path = value.get("bytes"), value.get("path")
        if content is None and path:
            try:
                return file_in(folder, path, place).read_bytes()
            except OSError as error:
                raise ConfigurationError(f"ImageData: {place}: its image {path} cannot be read: {error}.") from error
        value = content
    if not isinstance(value, bytes):
        raise ConfigurationError(
            f"ImageData: {place} holds no encoded image but a {type(value).__name__}; bytes or {{'bytes', 'path'}} is "
            "what an image column holds."
        )
    return value


def check_label(value: Any, place: str, column: str) -> Any:
    """A label: a number that is not negative, or a name.

    Raises:
        ConfigurationError: If it is neither.
    """
    negative = isinstance(value, int) and value < 0
    if negative or isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise refusal(f"ImageData: {place}", f"the label in {column!r}", "a number from 0 or a name", value)
    return value


def check_caption(value: Any, place: str, column: str) -> str:
    """A caption, which may be empty.

    Raises:
        ConfigurationError: If it is no text.
    """
    if not isinstance(value, str):
        raise refusal(f"ImageData: {place}", f"the caption in {column!r}", "a text", value)
    return value

"""Images in the messages of a row, in the forms in which data sets hold them.

    parts      {"type": "image", "image": ...} or {"type": "image_url", "image_url": {"url": ...}} in a content's list
    columns    "images": [...] or "image": ..., at the places of {"type": "image"}, or of ``<image>`` in texts
               (LLaVA, LLaMA-Factory), or before the first question if there is no such place (TRL)

An image is the path of a file in the folder of the data, the encoded bytes, {"bytes", "path"} (``datasets``), or a
``data:`` address. A part may hold {"base64": ...}. Nothing is downloaded.
"""

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Part = dict[str, Any]
Image = str | bytes
"""Path of an image, or its encoded bytes."""

PARTS = "content_parts"
"""Key of a message with the parts of its content, texts and images. ``content`` holds the texts alone."""
MARKER = "<image>"
IMAGE_COLUMNS = ("images", "image")
"""Columns of a row that may hold images."""
_KEYS = ("image", "image_url", "url", "path", "bytes")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def texts_of(message: Message) -> list[str]:
    """Return the texts of the content of a message, which images separate."""
    parts = message.get(PARTS)
    return [message["content"]] if parts is None else [part["text"] for part in parts if not is_image(part)]


def as_parts(message: Message) -> Message:
    """Return a message with a list of parts as its content, as the templates of processors read it."""
    kept = {key: value for key, value in message.items() if key != PARTS}
    return {**kept, "content": message.get(PARTS) or [{"type": "text", "text": message["content"]}]}


@dataclass(frozen=True)
class PicturedText:
    """Rendered conversation with the images at its places."""

    text: str
    images: tuple[Image, ...]
    sizes: Mapping[str, int]  # number of items of this row in each entry that is not of tokens


class UnplacedImage(ValueError):
    """Images of a row that do not fit its messages, or an image that cannot be read. The message is the reason."""


def is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a content is an image, in the format of Hugging Face or OpenAI."""
    return part.get("type") in ("image", "image_url", "input_image")


def place_images(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """Return messages in which each image is a part without content, and the images in the order of these parts.

    Args:
        messages: Messages, with the parts of a content that was a list.
        row: The row, which may have columns of images.

    Raises:
        UnplacedImage: If the row has more or fewer images than places, or the assistant's turn has one.
    """
    given = _given(row)
    parts = [list(message.get(PARTS) or [{"type": "text", "text": message["content"]}]) for message in messages]
    open_places = sum(is_image(part) and _held(part) is None for own in parts for part in own)
    if given and not open_places:
        parts = [list(_split_at_markers(own)) for own in parts]
        open_places = sum(is_image(part) and _held(part) is None for own in parts for part in own)
    if given and not open_places:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise UnplacedImage("it holds images, and no turn of the user")
        parts[first] = [{"type": "image"}] * len(given) + parts[first]
        open_places = len(given)
    if open_places != len(given):
        raise UnplacedImage(f"it holds {len(given)} images, and its messages have places for {open_places}")
    rest = iter(given)
    found = []
    placed = []
    for message, own in zip(messages, parts):
        if message["role"] == "assistant":
            if any(map(is_image, own)):
                raise UnplacedImage("a turn of the assistant holds an image, and models learn to write text only")
            placed.append({key: value for key, value in message.items() if key != PARTS})
            continue
        if not any(map(is_image, own)):
            placed.append(message)
            continue
        for part in filter(is_image, own):
            held = _held(part)
            found.append(next(rest) if held is None else held)
        bare: list[Part] = [{"type": "image"} if is_image(part) else part for part in own]
        texts = "".join(part["text"] for part in bare if not is_image(part))
        placed.append({**message, "content": texts, PARTS: bare})
    return tuple(placed), tuple(found)


def resolve_image(value: object, folder: Path | None) -> Image:
    """Return an image as the absolute path of a file or as bytes.

    Args:
        value: The image as it is in the row.
        folder: Folder that paths are relative to, and that they must not leave.

    Raises:
        UnplacedImage: If it is neither, or an address, or a path out of the folder.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise UnplacedImage(f"an image is a {type(value).__name__}, and neither a path nor encoded bytes")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise UnplacedImage(f"the address of an image is no base64: {error}") from error
    value = value.removeprefix("file://")
    if _ADDRESS.match(value):
        raise UnplacedImage(f"the image {value[:80]} would have to be downloaded: save it beside the data")
    if folder is None:
        raise UnplacedImage(f"the image {value} is a path, and this source has no folder: set rows.image_folder")
    inside = os.path.abspath(folder)
    # normpath resolves ".." without following links, which the owner of the folder may have made.
    path = os.path.normpath(os.path.join(inside, value))
    if not Path(path).is_relative_to(inside):
        raise UnplacedImage(f"the image {value} is not in {folder}: set rows.image_folder")
    return path


def _given(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a row."""
    values = [row[name] for name in IMAGE_COLUMNS if row.get(name) is not None]
    if len(values) > 1:
        raise UnplacedImage(f"it holds images in both {' and '.join(IMAGE_COLUMNS)}")
    if not values:
        return []
    return list(values[0]) if isinstance(values[0], list) else [values[0]]


def _held(part: Mapping[str, Any]) -> Any:
    """Return the image in a part; None if it stands in a column."""
    if isinstance(part.get("base64"), str):
        return f"data:;base64,{part['base64']}"
    return next((part[key] for key in _KEYS if part.get(key) is not None), None)


def _split_at_markers(parts: Sequence[Part]) -> Iterator[Part]:
    for part in parts:
        if is_image(part):
            yield part
            continue
        for number, text in enumerate(part["text"].split(MARKER)):
            if number:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}

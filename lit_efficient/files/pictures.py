"""Grids of images with captions, drawn by Pillow with its built-in ASCII font.

Captions stand above columns, left of rows or above each image, wherever the fewest words are needed.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import refusal
from lit_efficient.files.atomic_file import replacing

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# Pixels of the font, of a line of text, between captioned cells, and of the widest caption.
_SIZE = 12
_LINE = 18
_GAP = 6
_WIDEST = 200


def draw_grid(
    images: Tensor,
    columns: int,
    zoom: int = 1,
    *,
    captions: Sequence[str] = (),
    rows: Sequence[str] = (),
    heads: Sequence[str] = (),
) -> "Picture":
    """Draw images row by row; cells of an incomplete last row stay empty.

    Args:
        images: [N, C, H, W], uint8 or float in [-1, 1], with 1 or 3 channels.
        columns: Images per row.
        zoom: Factor of enlargement, and pixels between images without captions.
        captions: One caption per image. A caption that a column or row has in common is drawn once.
        rows: Captions of the rows.
        heads: Captions of the columns.
    """
    from PIL import Image, ImageDraw, ImageFont

    pixels = _pixels(images, zoom)
    if captions:
        rows, heads, captions = _said_once(captions, columns)
    font = ImageFont.load_default(_SIZE)
    above = [shortened(name, font) for name in heads or captions]
    left = [shortened(name, font) for name in rows]
    gap = _GAP if above or left else zoom
    edge = gap if above or left else 0
    caption_height = _LINE if captions else 0
    head_height = _LINE if heads else 0
    margin = _widest(left, font) + gap if left else 0
    width = max(pixels.shape[2], _widest(above, font))
    height = max(pixels.shape[1], _LINE if left else 0)
    step = caption_height + height + gap
    count = -(-len(pixels) // columns)
    size = (2 * edge + margin + columns * (width + gap) - gap, 2 * edge + head_height + count * step - gap)
    picture = Image.new("L" if images.shape[1] == 1 else "RGB", size, "white" if edge else "black")
    draw = ImageDraw.Draw(picture)
    for i, image in enumerate(pixels):
        row, column = divmod(i, columns)
        x = edge + margin + column * (width + gap)
        y = edge + head_height + row * step
        if captions:
            draw.text((x + width // 2, y), above[i], fill="black", font=font, anchor="ma")
        elif heads and row == 0:
            draw.text((x + width // 2, y - head_height), above[i], fill="black", font=font, anchor="ma")
        y += caption_height
        picture.paste(Image.fromarray(image), (x + (width - image.shape[1]) // 2, y + (height - image.shape[0]) // 2))
        if left and column == 0:
            draw.text((edge, y + height // 2), left[row], fill="black", font=font, anchor="lm")
    return picture


def write_picture(picture: "Picture", path: Path, about: Mapping[str, object] | None = None) -> None:
    """Write a PNG atomically, with ``about`` as texts in the file."""
    from PIL.PngImagePlugin import PngInfo

    notes = PngInfo()
    for name, value in (about or {}).items():
        notes.add_itxt(name, str(value))
    with replacing(path) as file:
        picture.save(file, format="PNG", pnginfo=notes)


def shortened(text: str, font: Any, width: int = _WIDEST) -> str:
    """Return ``text`` on one line, at most ``width`` pixels wide, with "?" for letters that the font lacks."""
    letters = unicodedata.normalize("NFKD", " ".join(text.split())[:200])  # splits accents off their letters
    missing = _drawn("\U0010ffff", font)
    plain = ""
    for letter in letters:
        if not unicodedata.combining(letter):
            plain += letter if _drawn(letter, font) != missing else "?"
    if font.getlength(plain) <= width:
        return plain
    while font.getlength(plain + "…") > width:
        plain = plain[:-1].rstrip()
    return plain + "…"


def _widest(names: Sequence[str], font: Any) -> int:
    return max((round(font.getlength(name)) for name in names), default=0)


def _drawn(letter: str, font: Any) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(letter)
    return mask.size, bytes(mask)


def _said_once(captions: Sequence[str], columns: int) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return captions of rows, of columns and of images, of which one kind is not empty."""
    if all(name == captions[i % columns] for i, name in enumerate(captions)):
        return (), captions[:columns], ()
    if all(name == captions[i - i % columns] for i, name in enumerate(captions)):
        return captions[::columns], (), ()
    return (), (), captions


def _pixels(images: Tensor, zoom: int) -> np.ndarray:
    """Return enlarged pixels as uint8, [N, H, W] or [N, H, W, 3]."""
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise refusal("draw_grid", "images", "[N, 1 or 3, H, W]", tuple(images.shape))
    if images.dtype != torch.uint8:
        images = ((images.detach().float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    large = images.cpu().repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    return large.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()

"""Grids of images with their names on them, by Pillow and its built-in font, which knows ASCII.

Names stand above columns, at the left of rows, or above each image: wherever they say it in the fewest words.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import refusal
from lit_efficient.files.atomic_file import replacing

_SIZE, _LINE, _GAP = 12, 18, 6  # pixels of the font, of a line, between named cells
_WIDEST = 200  # pixels of a name; a longer one is cut


def draw_grid(
    images: Tensor,
    columns: int,
    zoom: int = 1,
    *,
    captions: Sequence[str] = (),
    rows: Sequence[str] = (),
    heads: Sequence[str] = (),
) -> Any:
    """Images row by row as a picture of Pillow, a line of ``zoom`` pixels between them; a short last row is filled up.

    Images are [N, C, H, W], uint8, or float in [-1, 1]; C is 1 or 3. Of captions, one an image, what all of a column or
    of a row have in common is said once; rows and columns may have names, too.
    """
    from PIL import Image, ImageDraw, ImageFont

    pixels = _pixels(images, zoom)
    if captions:
        rows, heads, captions = _said_once(captions, columns)
    font = ImageFont.load_default(_SIZE)
    above = [shortened(name, font) for name in heads or captions]
    left = [shortened(name, font) for name in rows]
    gap = _GAP if above or left else zoom
    widest = [max((round(font.getlength(name)) for name in names), default=0) for names in (above, left)]
    width, height = max(pixels.shape[2], widest[0]), max(pixels.shape[1], _LINE if left else 0)
    margin, head = widest[1] + gap if left else 0, _LINE if heads else 0
    step = height + gap + (_LINE if captions else 0)
    edge = gap if above or left else 0
    count = -(-len(pixels) // columns)
    size = (2 * edge + margin + columns * (width + gap) - gap, 2 * edge + head + count * step - gap)
    picture = Image.new("L" if images.shape[1] == 1 else "RGB", size, "white" if edge else "black")
    draw = ImageDraw.Draw(picture)
    for i, image in enumerate(pixels):
        row, column = divmod(i, columns)
        x, y = edge + margin + column * (width + gap), edge + head + row * step
        if captions or (heads and row == 0):
            draw.text((x + width // 2, y - (0 if captions else head)), above[i], fill="black", font=font, anchor="ma")
        y += _LINE if captions else 0
        picture.paste(Image.fromarray(image), (x + (width - image.shape[1]) // 2, y + (height - image.shape[0]) // 2))
        if left and column == 0:
            draw.text((edge, y + height // 2), left[row], fill="black", font=font, anchor="lm")
    return picture


def write_picture(picture: Any, path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a PNG whole or not at all; ``about`` travels in it as text."""
    from PIL.PngImagePlugin import PngInfo

    notes = PngInfo()
    for name, value in (about or {}).items():
        notes.add_itxt(name, str(value))
    with replacing(path) as file:
        picture.save(file, format="PNG", pnginfo=notes)


def shortened(text: str, font: Any, width: int = _WIDEST) -> str:
    """``text`` in one line of letters that the font has, cut with an ellipsis where it is wider than ``width``."""
    letters = unicodedata.normalize("NFKD", " ".join(text.split())[:200])  # an e and its accent: the e can be drawn
    missing = _drawn("\U0010ffff", font)
    marks = {letter: letter if _drawn(letter, font) != missing else "?" for letter in set(letters)}
    marks |= {letter: "" for letter in marks if unicodedata.combining(letter)}
    plain = "".join(map(marks.__getitem__, letters))
    if font.getlength(plain) <= width:
        return plain
    while font.getlength(plain + "…") > width:
        plain = plain[:-1].rstrip()
    return plain + "…"


def _drawn(letter: str, font: Any) -> tuple[Any, bytes]:
    mask = font.getmask(letter)
    return mask.size, bytes(mask)


def _said_once(captions: Sequence[str], columns: int) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Names of rows, of columns and of images, of which one kind is there."""
    if all(name == captions[i % columns] for i, name in enumerate(captions)):
        return (), captions[:columns], ()
    if all(name == captions[i - i % columns] for i, name in enumerate(captions)):
        return captions[::columns], (), ()
    return (), (), captions


def _pixels(images: Tensor, zoom: int) -> Any:
    """[N, H, W] or [N, H, W, 3] of numpy, uint8, each pixel ``zoom`` times."""
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise refusal("draw_grid", "images", "[N, 1 or 3, H, W]", tuple(images.shape))
    if images.dtype != torch.uint8:
        images = ((images.detach().float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    large = images.cpu().repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    return large.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()

"""Encoded bytes to pixels: one rule for every format, and crops that are a pure function of (seed, index, variant).

    cover:    the largest part of the image that has the target's aspect, resampled to the target in one step
    variant:  0 is the centre, unflipped; the others lie anywhere along the side that is too long; odd ones are flipped

Transparent pixels are shown on white, EXIF's rotation is applied, palettes are resolved, 16 bits of grey become 8 by
scaling. Colour profiles are not applied. Of several frames the first is taken.
"""

from __future__ import annotations

import io
import random
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_efficient.distributed.seeds import mix_seed

if TYPE_CHECKING:
    from PIL.Image import Image

Channels = Literal["rgb", "grey"]
Crop = Literal["center", "random"]
Resample = Literal["lanczos", "bicubic"]

RULES = "1"  # part of every identity: raise it when the same bytes become other pixels
_MODES = {"rgb": "RGB", "grey": "L"}
_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 lie on their side
_END_OF_JPEG = b"\xff\xd9"
# The others that Pillow knows may start programs (PostScript), or are read by nobody else with care.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")


class UnreadableImage(Exception):
    """Bytes that are no image, or none whose pixels have a meaning; the message says why."""


def decode(content: bytes, channels: Channels = "rgb") -> Image:
    """Pixels of an encoded image, 8 bits a channel, upright and opaque.

    Raises:
        UnreadableImage: If there are none.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    image = _opened(content, load=True)
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format == "PNG"):
        grey = np.asarray(upright).astype(np.uint32)
        return Images.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8)).convert(_MODES[channels])
    if upright.mode in ("I", "F"):
        raise UnreadableImage(f"{image.format} with 32 bits a pixel: what is white in it is not said")
    if upright.has_transparency_data:
        opaque = upright.convert("RGBA")
        upright = Images.alpha_composite(Images.new("RGBA", opaque.size, "white"), opaque)
    elif upright.mode == "P":
        upright = upright.convert("RGB")  # to grey in one step, and some palettes would be read as grey levels
    return upright.convert(_MODES[channels])


def upright_size(content: bytes, thorough: bool = False) -> tuple[int, int]:
    """Height and width as :func:`decode` would give them, and whether the bytes look whole.

    ``thorough`` decodes them. Otherwise a JPEG is only looked at: it must come to its end. All others are decoded, and
    the checksums of a PNG compared.

    Raises:
        UnreadableImage: If it is none, or is damaged.
    """
    if thorough:
        image = decode(content)
        return image.height, image.width
    image = _opened(content, load=False)
    if image.format == "PNG":
        _trying(image.verify)
        image = _opened(content, load=False)  # verify() leaves nothing to read
    if image.format != "JPEG" or _END_OF_JPEG not in content[-64:]:
        _trying(image.load)
    on_its_side = _trying(image.getexif).get(_ORIENTATION, 1) >= 5
    return (image.width, image.height) if on_its_side else (image.height, image.width)


def crop_place(seed: int, index: int, variant: int) -> tuple[float, float]:
    """Where a variant's crop lies between the two ends of each side, in [0, 1): the centre for variant 0."""
    if variant == 0:
        return 0.5, 0.5
    draw = random.Random(mix_seed(seed, index, variant))  # noqa: S311
    return draw.random(), draw.random()


def cover(image: Image, height: int, width: int, place: tuple[float, float], resample: Resample) -> Image:
    """Crop at a place of :func:`crop_place` to the aspect of (height, width) and resample to it in one step,
    antialiased.
    """
    from PIL.Image import Resampling

    top, left, kept_height, kept_width = covering((image.height, image.width), (height, width), place)
    box = (left, top, min(left + kept_width, image.width), min(top + kept_height, image.height))
    return image.resize((width, height), Resampling[resample.upper()], box=box)


def covering(
    size: tuple[int, int], shape: tuple[int, int], place: tuple[float, float]
) -> tuple[float, float, float, float]:
    """Top, left, height and width of the crop of an image of ``size`` that becomes ``shape``."""
    scale = max(shape[0] / size[0], shape[1] / size[1])
    height, width = min(shape[0] / scale, size[0]), min(shape[1] / scale, size[1])
    return place[0] * (size[0] - height), place[1] * (size[1] - width), height, width


def to_tensor(image: Image, flip: bool = False) -> Tensor:
    """8-bit pixels to [C, H, W] float32 in [-1, 1]; mirrored if ``flip``."""
    pixels = np.asarray(image, dtype=np.float32)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    pixels = pixels[:, ::-1] if flip else pixels
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))) / 127.5 - 1.0


def _opened(content: bytes, load: bool) -> Image:
    from PIL import Image as Images

    image: Image = _trying(Images.open, io.BytesIO(content), formats=_FORMATS)
    if load:
        _trying(image.load)
    return image


def _trying(call: Any, *args: Any, **kwargs: Any) -> Any:
    from PIL import Image as Images

    try:
        return call(*args, **kwargs)
    # What the decoders of Pillow raise on damaged bytes.
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Images.DecompressionBombError) as error:
        reason = str(error).split("<_io")[0].strip().rstrip(":") or type(error).__name__
        raise UnreadableImage(reason) from error

"""Decoding and cropping of images: one rule for every format, and crops that depend on (seed, index, variant) alone.

    cover:    the largest part of the image with the aspect ratio of the target, resampled to the target in one step
    variant:  0 is the centre without flip; the other crops are anywhere along the longer side; odd ones are flipped

Transparent pixels become white, the rotation in EXIF is applied, palettes are resolved, and grey levels of 16 bits are
scaled to 8. Colour profiles are not applied. The first of several frames is used.
"""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed

if TYPE_CHECKING:
    from PIL.Image import Image

Channels = Literal["rgb", "grey"]
Crop = Literal["center", "random"]
Resample = Literal["lanczos", "bicubic"]
T = TypeVar("T")

# Part of every identity; raise it when the same bytes become other pixels.
RULES = "1"
_MODES = {"rgb": "RGB", "grey": "L"}
# Tag of EXIF; the values 5 to 8 swap height and width.
_ORIENTATION = 0x0112
_END_OF_JPEG = b"\xff\xd9"
# Other formats that Pillow knows may start programs (PostScript), or have decoders that are rarely tested.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")


class UnreadableImage(Exception):
    """Bytes that are no image, or an image whose pixel values have no known meaning. The message is the reason."""


def unreadable(place: str, error: UnreadableImage) -> ConfigurationError:
    """Return the error for an image that cannot be read."""
    return ConfigurationError(
        f"ImageData: {place} cannot be read: {error}. Repair it, or leave out damaged images with "
        "skip_unreadable: true."
    )


def decode(content: bytes, channels: Channels = "rgb") -> Image:
    """Return the pixels of an encoded image, with 8 bits for each channel, upright and opaque.

    Raises:
        UnreadableImage: If the bytes are no such image.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    image = _opened(content)
    _trying(image.load)
    upright = ImageOps.exif_transpose(image)
    # Pillow would cut these modes off at 255 instead of scaling them.
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format == "PNG"):
        grey = np.asarray(upright).astype(np.uint32)
        return Images.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8)).convert(_MODES[channels])
    if upright.mode in ("I", "F"):
        raise UnreadableImage(f"{image.format} with 32 bits a pixel: it does not state which value is white")
    # Without this step transparent pixels show the colour that happens to be stored under them.
    if upright.has_transparency_data:
        opaque = upright.convert("RGBA")
        upright = Images.alpha_composite(Images.new("RGBA", opaque.size, "white"), opaque)
    elif upright.mode == "P":
        # A direct conversion to grey would take some palettes for grey levels.
        upright = upright.convert("RGB")
    return upright.convert(_MODES[channels])


def decode_alpha(content: bytes) -> Image:
    """Return the opacity of an encoded image, upright, from 0 to 255.

    Raises:
        UnreadableImage: If the bytes are no such image.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    image = _opened(content)
    _trying(image.load)
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        return upright.convert("RGBA").getchannel("A")
    return Images.new("L", upright.size, 255)


def decode_mask(content: bytes) -> Image:
    """Return an encoded mask, upright, from black (0) to white (255).

    Raises:
        UnreadableImage: If the bytes are no such image, or white is stored as 1.
    """
    mask = decode(content, "grey")
    if mask.getextrema()[1] == 1:
        raise UnreadableImage("its brightest pixels are 1, and white is 255: multiply a mask of 0 and 1 by 255")
    return mask


def has_alpha(content: bytes) -> bool:
    """Return whether an encoded image declares transparent pixels."""
    return bool(_opened(content).has_transparency_data)


def upright_size(content: bytes, thorough: bool = False) -> tuple[int, int]:
    """Return height and width as of the image that `decode` gives, and check that the bytes look complete.

    ``thorough`` decodes the image. Otherwise a JPEG must only contain its end marker, the checksums of a PNG are
    compared, and all other formats are decoded.

    Raises:
        UnreadableImage: If the bytes are no image, or damaged.
    """
    if thorough:
        image = decode(content)
        return image.height, image.width
    image = _opened(content)
    if image.format == "PNG":
        _trying(image.verify)
        # An image cannot be read after verify().
        image = _opened(content)
    if image.format != "JPEG" or _END_OF_JPEG not in content[-64:]:
        _trying(image.load)
    if _trying(image.getexif).get(_ORIENTATION, 1) >= 5:
        return image.width, image.height
    return image.height, image.width


def crop_place(seed: int, index: int, variant: int) -> tuple[float, float]:
    """Return the place of a variant's crop along height and width, in [0, 1). Variant 0 is the centre."""
    if variant == 0:
        return 0.5, 0.5
    draw = random.Random(mix_seed(seed, index, variant))  # noqa: S311
    return draw.random(), draw.random()


def cover(
    image: Image, height: int, width: int, place: tuple[float, float], resample: Resample | Literal["box"]
) -> Image:
    """Crop an image at a place of `crop_place` to the aspect ratio of (height, width), and resample it in one step.

    Resampling uses antialiasing.
    """
    from PIL.Image import Resampling

    top, left, kept_height, kept_width = covering((image.height, image.width), (height, width), place)
    # Rounding may place an edge beyond the image by a tiny amount, which Pillow refuses.
    box = (left, top, min(left + kept_width, image.width), min(top + kept_height, image.height))
    return image.resize((width, height), Resampling[resample.upper()], box=box)


def covering(
    size: tuple[int, int], shape: tuple[int, int], place: tuple[float, float]
) -> tuple[float, float, float, float]:
    """Return top, left, height and width of the crop of an image of ``size`` that is resampled to ``shape``."""
    scale = max(shape[0] / size[0], shape[1] / size[1])
    height = min(shape[0] / scale, size[0])
    width = min(shape[1] / scale, size[1])
    return place[0] * (size[0] - height), place[1] * (size[1] - width), height, width


def to_tensor(image: Image, flip: bool = False) -> Tensor:
    """Return 8-bit pixels as [C, H, W] float32 in [-1, 1], mirrored if ``flip``."""
    pixels = np.asarray(image, dtype=np.float32)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if flip:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))) / 127.5 - 1.0


def _opened(content: bytes) -> Image:
    from PIL import Image as Images

    return _trying(Images.open, io.BytesIO(content), formats=_FORMATS)


def _trying(call: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a function of Pillow, and turn the errors that its decoders raise for damaged bytes into one."""
    from PIL import Image as Images

    try:
        return call(*args, **kwargs)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Images.DecompressionBombError) as error:
        reason = str(error).split("<_io")[0].strip().rstrip(":") or type(error).__name__
        raise UnreadableImage(reason) from error

"""How images are looked at: their size, and the crops and flips that are their variants."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.data.images.aspect_buckets import AspectBuckets, Shape
from lit_efficient.data.images.image_pixels import (
    RULES,
    Channels,
    Crop,
    Resample,
    cover,
    covering,
    crop_place,
    decode,
    to_tensor,
)
from lit_efficient.errors import check_choice, check_number, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


@dataclass(frozen=True)
class ImageView:
    """Size, crop and variants of images.

    Args:
        resolution: Height and width in pixels, a multiple of 8; with buckets the square root of the area.
        channels: ``rgb`` or ``grey``.
        buckets: Batches of several aspect ratios: true for steps of 64 pixels and aspects up to 2, or a description.
        crop: Where the covering crop of variants other than 0 lies, ``center`` or ``random``.
        horizontal_flip: Mirror odd variants.
        variants: Looks at each image, of which an epoch shows one: 1 for a center crop without flip, 2 with flip, any
            number of at least 2 for random crops. Variant 0 is the center crop, unflipped; validation sees it alone.
        resample: Kernel of resampling, ``lanczos`` or ``bicubic``, antialiased.
    """

    resolution: int = 256
    channels: Channels = "rgb"
    buckets: bool | AspectBuckets = False
    crop: Crop = "center"
    horizontal_flip: bool = False
    variants: int = 1
    resample: Resample = "lanczos"

    def __post_init__(self) -> None:
        check_number("ImageData", "view.resolution", self.resolution, least=8, most=2**16, whole=True)
        if self.resolution % 8:
            raise refusal("ImageData", "view.resolution", "a multiple of 8", self.resolution)
        check_choice("ImageData", "view.channels", self.channels, ("rgb", "grey"))
        check_choice("ImageData", "view.crop", self.crop, ("center", "random"))
        check_choice("ImageData", "view.resample", self.resample, ("lanczos", "bicubic"))
        check_choice("ImageData", "view.horizontal_flip", self.horizontal_flip, (True, False))
        if not isinstance(self.buckets, bool | AspectBuckets):
            raise refusal("ImageData", "view.buckets", "true, false, or AspectBuckets", self.buckets)
        most = None if self.crop == "random" else 1 + self.horizontal_flip
        check_number("ImageData", "view.variants", self.variants, least=1, whole=True)
        if self.variants < (most or 2) or (most is not None and self.variants > most):
            flip = "with" if self.horizontal_flip else "without"
            allowed = f"{most or 'at least 2'} for crop: {self.crop} {flip} horizontal_flip"
            raise refusal("ImageData", "view.variants", allowed, self.variants)
        self.shapes()  # buckets that cannot be fail now

    def shapes(self) -> list[Shape]:
        """The shapes that there are, from the tallest to the widest."""
        if self.buckets is False:
            return [(self.resolution, self.resolution)]
        return self._steps().shapes(self.resolution)

    def look(self, content: bytes, shape: Shape, key: Key, seed: int) -> Tensor:
        """Encoded bytes to [C, height, width] float32 in [-1, 1]: the same for equal arguments, in any process.

        The key is index and variant; the seed is that of random crops.
        """
        image = cover(decode(content, self.channels), *shape, self._place(key, seed), self.resample)
        return to_tensor(image, flip=self._flips(key))

    def sizes(self, size: tuple[int, int], shape: Shape, key: Key, seed: int) -> Tensor:
        """What SDXL takes beside an image of ``size``, [6] int64: its size, top and left of the crop, the crop's size.

        The crop's place is in pixels of the resized image, of the flipped one where it is flipped.
        """
        top, left, height, width = covering(size, shape, self._place(key, seed))
        left = size[1] - width - left if self._flips(key) else left
        scale = shape[0] / height
        return torch.tensor([*size, round(top * scale), round(left * scale), *shape])

    def _place(self, key: Key, seed: int) -> tuple[float, float]:
        return crop_place(seed, *key) if self.crop == "random" else (0.5, 0.5)

    def _flips(self, key: Key) -> bool:
        return self.horizontal_flip and key[1] % 2 == 1

    def identity(self, seed: int) -> dict[str, str]:
        """What decides the pixels beside the content, by name."""
        flip = ", odd variants flipped" if self.horizontal_flip else ""
        steps = self._steps()
        return {
            "transform": f"{self.channels}, {self.resample}, {self.crop} crop{flip}, rules {RULES}",
            "resolution": f"{self.resolution}x{self.resolution}",
            "buckets": f"step {steps.step}, max_aspect {steps.max_aspect:g}" if self.buckets else "none",
            "variants": str(self.variants),
            "seed": str(seed) if self.crop == "random" else "not used",
        }

    def _steps(self) -> AspectBuckets:
        return self.buckets if isinstance(self.buckets, AspectBuckets) else AspectBuckets()

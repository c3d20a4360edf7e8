"""Size of images, and the crops and flips that are their variants."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.data.images.aspect_buckets import AspectBuckets, Shape
from lit_efficient.data.images.image_pixels import (
    RULES,
    Channels,
    Crop,
    Resample,
    UnreadableImage,
    cover,
    covering,
    crop_place,
    decode,
    decode_alpha,
    decode_mask,
    to_tensor,
    unreadable,
)
from lit_efficient.errors import check_choice, check_number, checks_types, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


@checks_types
@dataclass(frozen=True)
class ImageView:
    """Size, crop and variants of images.

    Args:
        resolution: Height and width in pixels, a multiple of 8. With buckets, the square root of the area.
        channels: ``rgb`` or ``grey``.
        buckets: Batches with several aspect ratios. true uses steps of 64 pixels and aspect ratios of up to 2.
        crop: Place of the crop in variants other than 0: ``center`` or ``random``.
        horizontal_flip: Mirror the odd variants.
        variants: Number of variants of each image; an epoch shows one of them. 1 for a center crop without flip, 2 with
            flip, any number of at least 2 for random crops. Variant 0 is the center crop without flip, and validation
            uses it alone.
        resample: Kernel for resampling, ``lanczos`` or ``bicubic``, with antialiasing.
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
        check_number("ImageData", "view.variants", self.variants, least=1, whole=True)
        flip = "with" if self.horizontal_flip else "without"
        if self.crop == "random":
            if self.variants < 2:
                allowed = f"at least 2 for crop: random {flip} horizontal_flip"
                raise refusal("ImageData", "view.variants", allowed, self.variants)
        elif self.variants != 1 + self.horizontal_flip:
            allowed = f"{1 + self.horizontal_flip} for crop: center {flip} horizontal_flip"
            raise refusal("ImageData", "view.variants", allowed, self.variants)
        # Buckets that do not exist raise an error now.
        self.shapes()

    def shapes(self) -> list[Shape]:
        """Return all shapes, from the tallest to the widest."""
        if self.buckets is False:
            return [(self.resolution, self.resolution)]
        return self._buckets().shapes(self.resolution)

    def sees(
        self, files: Mapping[str, tuple[bytes, str]], size: Shape, shape: Shape, key: Key, seed: int, alpha: bool
    ) -> dict[str, Tensor]:
        """Return an image as an item, with its ``sizes``, and its ``mask`` and ``condition`` with the same crop.

        Args:
            files: Encoded ``images``, and optional ``mask`` and ``condition``, each with its place for errors.
            size: Height and width of the image.
            shape: Height and width of the results.
            key: Index and variant.
            seed: Seed of random crops.
            alpha: Take the opacity of the image as its mask.

        Raises:
            ConfigurationError: If one of them cannot be decoded.
        """
        if alpha:
            files = {**files, "mask": files["images"]}
        item = {"sizes": self.sizes(size, shape, key, seed)}
        for name, (content, place) in files.items():
            try:
                if name == "mask":
                    item[name] = self.look_mask(content, shape, key, seed, alpha)
                else:
                    item[name] = self.look(content, shape, key, seed)
            except UnreadableImage as error:
                raise unreadable(place, error) from error
        return item

    def look(self, content: bytes, shape: Shape, key: Key, seed: int) -> Tensor:
        """Decode, crop and resample an image to [C, height, width] float32 in [-1, 1].

        The result is the same for equal arguments in any process.

        Args:
            content: Encoded bytes.
            shape: Height and width of the result.
            key: Index and variant.
            seed: Seed of random crops.
        """
        image = cover(decode(content, self.channels), *shape, self._place(key, seed), self.resample)
        return to_tensor(image, flip=self.mirrors(key[1]))

    def look_mask(self, content: bytes, shape: Shape, key: Key, seed: int, alpha: bool = False) -> Tensor:
        """Return a mask [1, height, width] in [0, 1], with the crop and the flip of :meth:`look`.

        ``alpha`` takes the opacity of an image. Otherwise white is 1.
        """
        mask = decode_alpha(content) if alpha else decode_mask(content)
        # The kernel of the images would overshoot at the edges of the mask.
        return (to_tensor(cover(mask, *shape, self._place(key, seed), "box"), flip=self.mirrors(key[1])) + 1.0) / 2.0

    def sizes(self, size: Shape, shape: Shape, key: Key, seed: int) -> Tensor:
        """Return the size conditioning of SDXL: original size, top and left of the crop, size of the crop, [6] int64.

        Top and left are in pixels of the resized image; if the image is flipped, of the flipped one.
        """
        top, left, height, width = covering(size, shape, self._place(key, seed))
        # The conditioning describes the image as the network sees it.
        if self.mirrors(key[1]):
            left = size[1] - width - left
        scale = shape[0] / height
        return torch.tensor([*size, round(top * scale), round(left * scale), *shape])

    def _place(self, key: Key, seed: int) -> tuple[float, float]:
        if self.crop == "random":
            return crop_place(seed, *key)
        return (0.5, 0.5)

    def mirrors(self, variant: int) -> bool:
        """Return whether a variant is mirrored."""
        return self.horizontal_flip and variant % 2 == 1

    def identity(self, seed: int) -> dict[str, str]:
        """Return all that the pixels depend on but the content, by name."""
        flip = ", odd variants flipped" if self.horizontal_flip else ""
        buckets = self._buckets()
        return {
            "transform": f"{self.channels}, {self.resample}, {self.crop} crop{flip}, rules {RULES}",
            "resolution": f"{self.resolution}x{self.resolution}",
            "buckets": f"step {buckets.step}, max_aspect {buckets.max_aspect:g}" if self.buckets else "none",
            "variants": str(self.variants),
            "seed": str(seed) if self.crop == "random" else "not used",
        }

    def _buckets(self) -> AspectBuckets:
        if isinstance(self.buckets, AspectBuckets):
            return self.buckets
        return AspectBuckets()

"""Progressive resizing: train on small images first, and increase their size step by step.

    scale at step t = start + (1 - start) * min(1, max(0, t - delay) / steps);  sides rounded to multiple_of

Saves: compute for the removed pixels, which is (1 - scale^2) of the compute of a convolution
Costs: fine detail is learned later; a compiled network is compiled again for each size
Source: progressive resizing, Howard (2018), https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; Karras et al.
    (2018), https://arxiv.org/abs/1710.10196; Tan and Le (2021), https://arxiv.org/abs/2104.00298
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.moving import rebuilt, tensors_in
from lit_efficient.mechanisms.ramps import BatchChanges, check_steps, ramped, steps_of

_Size = tuple[int, int]  # height and width


def resize(images: Tensor, scale: float, multiple_of: int = 1) -> Tensor:
    """Return resized images of the same dtype, with a filter against aliasing.

    Args:
        images: Images [B, C, H, W], floating-point or uint8.
        scale: Factor of the sides, above 0.
        multiple_of: Divisor of the new sides, which are at least this long. A scale of at most 1 never enlarges a side.

    Example:
        >>> resize(torch.ones(1, 3, 20, 10), 0.5, multiple_of=4).shape
        torch.Size([1, 3, 8, 4])
    """
    return _resized(images, *scaled_sides([(images.shape[-2], images.shape[-1])], scale, multiple_of).values())


def scaled_sides(sizes: Iterable[_Size], scale: float, multiple_of: int = 1) -> dict[_Size, _Size]:
    """Return a dictionary from each old size (height, width) to its new size.

    If a side is a multiple of the smallest side, it remains the same multiple of it.

    Example:
        >>> scaled_sides([(12, 12), (48, 48)], 0.5, multiple_of=4)
        {(12, 12): (8, 8), (48, 48): (32, 32)}
    """

    def scaled(side: int) -> int:
        new = max(multiple_of, round(side * scale / multiple_of) * multiple_of)
        if scale <= 1:
            return min(new, side)
        return new

    def scaled_like(side: int, smallest: int) -> int:
        if side % smallest == 0:
            return side // smallest * scaled(smallest)
        return scaled(side)

    sizes = list(sizes)
    if not sizes:
        return {}
    least_height = min(height for height, _ in sizes)
    least_width = min(width for _, width in sizes)
    return {(h, w): (scaled_like(h, least_height), scaled_like(w, least_width)) for h, w in sizes}


def _resized(images: Tensor, sides: _Size) -> Tensor:
    if sides == images.shape[-2:]:
        return images
    # In float32, because uint8 images and narrow dtypes would be rounded inside the filter.
    resized = F.interpolate(images.float(), sides, mode="bilinear", antialias=True)
    if images.dtype == torch.uint8:
        resized = resized.round().clamp(0, 255)
    return resized.to(images.dtype)


def resize_labels(labels: Tensor, sides: _Size) -> Tensor:
    """Return labels of pixels in a new size, by nearest neighbour.

    The centres of the new pixels are those of `resize`, so labels and images stay aligned.

    Args:
        labels: Labels [..., H, W] of any dtype.
        sides: New height and width.
    """
    for dim, side in zip((-2, -1), sides, strict=True):
        old = labels.shape[dim]
        nearest = (2 * torch.arange(side, device=labels.device) + 1) * old // (2 * side)
        labels = labels.index_select(dim, nearest)
    return labels


class ResolutionRamp(BatchChanges):
    """Train on smaller images first, and validate on full-size images. The network must accept images of any size.

    In each batch, tensors [B, C, H, W] with one or three channels are resized. If a batch has images with three
    channels, integer tensors [B, H, W] and [B, 1, H, W] of the same size are labels of their pixels, and are resized by
    nearest neighbour. If the sides of an image are multiples of those of the smallest images, as for targets of
    super-resolution, they remain the same multiples. Batches of ``latents`` raise an error; for them encode smaller
    images. The number of samples does not change. While memory is measured, images have their full size.

    Args:
        start: Scale of the sides of the first images, above 0 and below 1.
        steps: Number of optimizer steps until images have their full size, or a share of ``max_steps`` between 0 and 1.
        delay: Number of steps, or a share of ``max_steps``, before the sides begin to grow, at least 0.
        multiple_of: Divisor of the sides of the smallest images, at least 1: the downsampling factor of the network, or
            its patch size.

    Raises:
        ConfigurationError: For an argument out of range, for batches without images, or for images whose size does not
            change at ``start``.
    """

    phase = Phase.LOSS
    needs = ("steps",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "small images at first, which cost less")}

    def __init__(
        self, start: float = 0.5, steps: int | float = 0.5, delay: int | float = 0, multiple_of: int = 8
    ) -> None:
        super().__init__()
        check_number("ResolutionRamp", "start", start, above=0, below=1)
        check_steps("ResolutionRamp", "steps", steps)
        check_steps("ResolutionRamp", "delay", delay, least=0)
        check_number("ResolutionRamp", "multiple_of", multiple_of, least=1, whole=True)
        self.start = start
        self.steps = steps
        self.delay = delay
        self.multiple_of = multiple_of
        self._steps = 1
        self._delay = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._steps = steps_of("ResolutionRamp", "steps", self.steps, trainer)
            self._delay = steps_of("ResolutionRamp", "delay", self.delay, trainer)
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"sides times {self.start:g} at first, full size after {self._delay + self._steps} steps")

    def change(self, batch: object, step: int) -> Any:
        scale = ramped(step, self.start, 1.0, self._steps, self._delay)
        if scale >= 1:
            return batch
        return self.scaled(batch, scale)

    def scaled(self, batch: object, scale: float) -> Any:
        """Return a batch with resized images. Override this method for batches with another layout."""
        images = [tensor for tensor in tensors_in(batch) if _is_image(tensor)]
        named: Mapping[str, object] = {}
        if isinstance(batch, Mapping):
            named = batch
        if not images or "latents" in named or any(named.get("mean") is image for image in images):
            shapes = [list(tensor.shape) for tensor in tensors_in(batch)][:4]
            raise ConfigurationError(
                f"ResolutionRamp: a batch with tensors {shapes} has no images [B, C, H, W] of one or three channels. "
                "Override ResolutionRamp.scaled for other layouts, or leave ResolutionRamp out"
            )
        sides = scaled_sides({(image.shape[-2], image.shape[-1]) for image in images}, scale, self.multiple_of)
        if scale == self.start and all(new == old for old, new in sides.items()):
            known = ", ".join(f"{height} x {width}" for height, width in sides)
            allowed = f"so small that images of {known} are smaller at start={scale:g}"
            raise refusal("ResolutionRamp", "multiple_of", allowed, self.multiple_of)
        pixels = {(len(image), *image.shape[-2:]) for image in images if image.shape[1] == 3}

        def change(item: object) -> Any:
            if not isinstance(item, Tensor):
                return rebuilt(item, change)
            if not item.is_floating_point() and (tuple(item.shape) in pixels or _of_one_channel(item) in pixels):
                return resize_labels(item, sides[item.shape[-2], item.shape[-1]])
            if _is_image(item):
                return _resized(item, sides[item.shape[-2], item.shape[-1]])
            return item

        return change(batch)


def _of_one_channel(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape [B, H, W] for a tensor [B, 1, H, W]."""
    if tensor.ndim != 4:
        return ()
    return tuple(tensor.squeeze(1).shape)


def _is_image(tensor: Tensor) -> bool:
    kind = tensor.is_floating_point() or tensor.dtype == torch.uint8
    return kind and tensor.ndim == 4 and tensor.shape[1] in (1, 3)

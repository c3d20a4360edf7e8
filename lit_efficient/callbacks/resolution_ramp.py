"""Progressive resizing: small images first, and larger ones step by step.

    scale at step t = start + (1 - start) * min(1, max(0, t - delay) / steps);  sides rounded to multiple_of

Saves: the compute of the pixels that are left out, (1 - scale^2) of a convolution's
Costs: fine detail is learned later; a compiled network compiles for each size
Source: progressive resizing, Howard (2018), https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; Karras et al.
    (2018), https://arxiv.org/abs/1710.10196; Tan and Le (2021), https://arxiv.org/abs/2104.00298
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.moving import rebuilt, tensors_in
from lit_efficient.mechanisms.ramps import BatchChanges, check_steps, ramped, steps_of

_Size = tuple[int, int]  # height and width


def resize(images: Tensor, scale: float, multiple_of: int = 1) -> Tensor:
    """Images of other sides, filtered so that nothing aliases.

    Args:
        images: [B, C, H, W], floating-point or uint8, which stays what it is.
        scale: Of the sides, above 0.
        multiple_of: New sides are multiples of this, at least one of it and at most the old sides.

    Example:
        >>> resize(torch.ones(1, 3, 20, 10), 0.5, multiple_of=4).shape
        torch.Size([1, 3, 8, 4])
    """
    return _resized(images, *scaled_sides([(images.shape[-2], images.shape[-1])], scale, multiple_of).values())


def scaled_sides(sizes: Iterable[_Size], scale: float, multiple_of: int = 1) -> dict[_Size, _Size]:
    """Heights and widths by those that they take the place of; a side that is a multiple of the smallest one stays so.

    Example:
        >>> scaled_sides([(12, 12), (48, 48)], 0.5, multiple_of=4)
        {(12, 12): (8, 8), (48, 48): (32, 32)}
    """

    def scaled(side: int) -> int:
        new = max(multiple_of, round(side * scale / multiple_of) * multiple_of)
        return min(new, side) if scale <= 1 else new

    sizes = list(sizes)
    least = [min(sides) for sides in zip(*sizes, strict=True)]
    new = [
        [scaled(s) if s % low else s // low * scaled(low) for s, low in zip(one, least, strict=True)] for one in sizes
    ]
    return {size: (height, width) for size, (height, width) in zip(sizes, new, strict=True)}


def _resized(images: Tensor, sides: _Size) -> Tensor:
    if sides == images.shape[-2:]:
        return images
    resized = F.interpolate(images.float(), sides, mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(images.dtype) if images.dtype == torch.uint8 else resized.to(images.dtype)


def resize_labels(labels: Tensor, sides: _Size) -> Tensor:
    """Labels [..., H, W] of pixels, any format: those nearest to the middles of the new ones, as `resize` has them."""
    for dim, side in zip((-2, -1), sides, strict=True):
        old = labels.shape[dim]
        nearest = (2 * torch.arange(side, device=labels.device) + 1) * old // (2 * side)
        labels = labels.index_select(dim, nearest)
    return labels


class ResolutionRamp(BatchChanges):
    """Train on images of smaller sides first, and validate on whole ones; for networks that take any size.

    Resizes the tensors [B, C, H, W] of a batch that have one or three channels. Beside images of three channels whole
    numbers [B, H, W] and [B, 1, H, W] are labels of their pixels, of which the nearest is taken. Larger images whose
    sides are multiples of the smallest ones', as targets of super-resolution, stay so many times as large. Batches of
    ``latents`` are refused: encode smaller images for them. Samples count as they are; while memory is measured, images
    are whole.

    Args:
        start: Scale of the first images' sides, above 0 and below 1.
        steps: Optimizer steps until they are whole, or a share of ``max_steps`` between 0 and 1.
        delay: Steps, or a share, before the sides begin to grow, at least 0.
        multiple_of: What sides of the smallest images must be a multiple of: the network's factor of reduction, or its
            patch size.

    Raises:
        ConfigurationError: For an argument out of range, and for batches without images, or with those that stay
            what they are at ``start``.
    """

    phase = Phase.LOSS
    needs = ("steps",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "small images first, which cost less")}

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
        self._steps, self._delay = 1, 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._steps = steps_of("ResolutionRamp", "steps", self.steps, trainer)
            self._delay = steps_of("ResolutionRamp", "delay", self.delay, trainer)
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"sides times {self.start:g} at first, whole after {self._delay + self._steps} steps")

    def change(self, batch: Any, step: int) -> Any:
        scale = ramped(step, self.start, 1.0, self._steps, self._delay)
        return batch if scale >= 1 else self.scaled(batch, scale)

    def scaled(self, batch: Any, scale: float) -> Any:
        """A batch with its images resized; override it where they are kept in another way."""
        images = [tensor for tensor in tensors_in(batch) if _is_image(tensor)]
        named = batch if isinstance(batch, Mapping) else {}
        if not images or "latents" in named or any(named.get("mean") is image for image in images):
            shapes = [list(tensor.shape) for tensor in tensors_in(batch)][:4]
            raise ConfigurationError(
                f"ResolutionRamp: a batch with tensors {shapes} has no images [B, C, H, W] of one or three channels"
            )
        sides = scaled_sides({(image.shape[-2], image.shape[-1]) for image in images}, scale, self.multiple_of)
        if scale == self.start and all(new == old for old, new in sides.items()):
            known = ", ".join(f"{height} x {width}" for height, width in sides)
            allowed = f"so small that images of {known} are smaller at start={scale:g}"
            raise refusal("ResolutionRamp", "multiple_of", allowed, self.multiple_of)
        pixels = {(len(image), *image.shape[-2:]) for image in images if image.shape[1] == 3}

        def change(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return rebuilt(item, change)
            if not item.is_floating_point() and (tuple(item.shape) in pixels or _of_one_channel(item) in pixels):
                return resize_labels(item, sides[item.shape[-2], item.shape[-1]])
            return _resized(item, sides[item.shape[-2], item.shape[-1]]) if _is_image(item) else item

        return change(batch)


def _of_one_channel(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.squeeze(1).shape) if tensor.ndim == 4 else ()


def _is_image(tensor: Tensor) -> bool:
    kind = tensor.is_floating_point() or tensor.dtype == torch.uint8
    return kind and tensor.ndim == 4 and tensor.shape[1] in (1, 3)

"""Aspect-ratio buckets: images keep about their shape, batches have one, and none has more pixels than asked for.

    shapes = all (h, w) in steps with h * w <= resolution^2 and aspect <= max_aspect that no step more on a side fits in
    bucket = the shape nearest in log(w / h)

Saves: what a square crop throws away: a third of a 3:2 photograph.
Costs: batches of several shapes; a compiled network is compiled for each.
Source: NovelAI (2022), https://github.com/NovelAI/novelai-aspect-ratio-bucketing.
"""

import math
from dataclasses import dataclass

import numpy as np

from lit_efficient.errors import ConfigurationError, check_number, refusal

Shape = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class AspectBuckets:
    """Which shapes there are.

    Args:
        step: sides are multiples of it, in pixels: a multiple of 8. Small steps keep more of each image, large ones
            make fewer shapes.
        max_aspect: longer side by shorter side, at most.
    """

    step: int = 64
    max_aspect: float = 2.0

    def __post_init__(self) -> None:
        check_number("AspectBuckets", "step", self.step, least=8, whole=True)
        if self.step % 8:
            raise refusal("AspectBuckets", "step", "a multiple of 8", self.step)
        check_number("AspectBuckets", "max_aspect", self.max_aspect, above=1)

    def shapes(self, resolution: int) -> list[Shape]:
        """The shapes for images of ``resolution`` squared pixels, from the tallest to the widest.

        Raises:
            ConfigurationError: If there is one only.
        """
        area, step = resolution**2, self.step
        widths = range(step, int(resolution * math.sqrt(self.max_aspect)) + step, step)
        tallest = {width: area // width // step * step for width in widths}
        found = [
            (height, width)
            for width, height in tallest.items()
            if height and (width + step) * height > area and max(height / width, width / height) <= self.max_aspect
        ]
        if len(found) < 2:
            raise ConfigurationError(
                f"AspectBuckets: step = {step} and max_aspect = {self.max_aspect:g} leave {len(found)} shape for a "
                f"resolution of {resolution}: a smaller step or a larger max_aspect makes more, buckets: false is one."
            )
        return sorted(found, key=lambda shape: shape[1] / shape[0])


def nearest_shapes(sizes: np.ndarray, shapes: list[Shape]) -> np.ndarray:
    """Number of the shape that is nearest to each size [N, 2] in log aspect; of two equally near ones the taller."""
    wanted = np.log(sizes[:, 1] / sizes[:, 0])
    offered = np.log([width / height for height, width in shapes])
    return np.abs(wanted[:, None] - offered[None]).argmin(axis=1)

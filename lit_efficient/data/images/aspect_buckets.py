"""Aspect-ratio buckets: images keep about their aspect ratio, and a batch has one shape of limited area.

    shapes = all (h, w) in steps with h * w <= resolution^2 and aspect <= max_aspect, with no room for another step
    bucket = the shape nearest in log(w / h)

Saves: what a square crop throws away: a third of a 3:2 photograph.
Costs: batches of several shapes; a compiled network is compiled for each.
Source: NovelAI (2022), https://github.com/NovelAI/novelai-aspect-ratio-bucketing.
"""

import math
from dataclasses import dataclass

import numpy as np

from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal

Shape = tuple[int, int]
"""Height and width in pixels."""


@checks_types
@dataclass(frozen=True)
class AspectBuckets:
    """Set of image shapes, of which a batch has one.

    Args:
        step: Step of heights and widths in pixels, a multiple of 8. Small steps crop less, large steps make fewer
            shapes.
        max_aspect: Largest ratio of the longer side to the shorter side.
    """

    step: int = 64
    max_aspect: float = 2.0

    def __post_init__(self) -> None:
        check_number("AspectBuckets", "step", self.step, least=8, whole=True)
        if self.step % 8:
            raise refusal("AspectBuckets", "step", "a multiple of 8", self.step)
        check_number("AspectBuckets", "max_aspect", self.max_aspect, above=1)

    def shapes(self, resolution: int) -> list[Shape]:
        """Return the shapes for images of ``resolution`` squared pixels, from the tallest to the widest.

        Raises:
            ConfigurationError: If there is only one shape.
        """
        area = resolution**2
        found = []
        widest = int(resolution * math.sqrt(self.max_aspect))
        for width in range(self.step, widest + self.step, self.step):
            height = area // width // self.step * self.step
            if not height or max(height / width, width / height) > self.max_aspect:
                continue
            # Without this condition a wider shape of the same height would fit, too.
            if (width + self.step) * height > area:
                found.append((height, width))
        if len(found) < 2:
            raise ConfigurationError(
                f"AspectBuckets: step = {self.step} and max_aspect = {self.max_aspect:g} give {len(found)} shape for a "
                f"resolution of {resolution}. Use a smaller step or a larger max_aspect, or set buckets: false."
            )
        return sorted(found, key=lambda shape: shape[1] / shape[0])


def nearest_shapes(sizes: np.ndarray, shapes: list[Shape]) -> np.ndarray:
    """Return the number of the shape nearest to each size [N, 2] in log aspect [N]. A tie goes to the taller shape."""
    # In log space 2:1 and 1:2 are equally far from a square.
    wanted = np.log(sizes[:, 1] / sizes[:, 0])
    offered = np.log([width / height for height, width in shapes])
    return np.abs(wanted[:, None] - offered[None]).argmin(axis=1)

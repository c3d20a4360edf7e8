"""Distances between generated and real images in the features of any vision model that a config can name.

    features of an image = its network's output, averaged over tokens or positions, [D]

They are the FID and the KID only for one particular Inception network, and are not called so. Values compare only with
values of the same network and the same real images.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.models.judges.sample_quality import distances_of_features
from lit_efficient.models.libraries.teachers import find_teacher


@dataclass(frozen=True)
class ImageScores:
    """What generated images are compared with real ones by.

    Args:
        judge: Folder, name or ``config.json`` of a transformers vision model, whose features are compared; null gives
            no scores.
        images: Training images to compare with.
    """

    judge: str | None = None
    images: int = 1000

    def __post_init__(self) -> None:
        check_number("ImageData", "scores.images", self.images, least=2, whole=True)


class ImageJudge:
    """Compares sets of images.

    Args:
        spec: Folder, name or ``config.json`` of a transformers vision model; the latter has random weights (seed 0),
            which still tell distributions apart, and serve for trials.
        who: Who asks, for errors.

    Raises:
        ConfigurationError: If there is no such model.
    """

    def __init__(self, spec: str, who: str) -> None:
        self.who = who
        self._teacher = find_teacher(spec, [""], who=who)
        self._real: Tensor | None = None

    def show(self, real: Iterable[Tensor]) -> None:
        """Take real images to compare with, each [C, H, W] in [-1, 1]; their sizes may differ."""
        self._real = torch.cat([self.features(image[None]) for image in real])

    def features(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [-1, 1] to features [B, D]."""
        found = self._teacher.of_images(images)[""].float()
        if found.ndim == 3:  # tokens
            return found.mean(dim=1)
        if found.ndim == 4:  # positions
            return found.mean(dim=(2, 3))
        if found.ndim != 2:
            raise ConfigurationError(f"{self.who}: judge must give features [B, D] of images, not {list(found.shape)}.")
        return found

    def distances(self, images: Tensor) -> dict[str, float]:
        """``frechet_distance`` and ``kernel_distance`` of images [M, C, H, W] in [-1, 1], M >= 2; lower is better."""
        assert self._real is not None, "show() comes first"
        generated = torch.cat([self.features(part) for part in images.cpu().float().split(32)])
        return distances_of_features(self._real, generated)

"""Distances between generated and real images in the features of any vision model that a config can name.

    features of an image = output of the network, averaged over tokens or positions, [D]

These distances are the FID and the KID only with one particular Inception network, so they have other names. Values can
be compared only if the network and the real images are the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, checks_types
from lit_efficient.models.judges.sample_quality import distances_of_features
from lit_efficient.models.libraries.teachers import find_teacher


@checks_types
@dataclass(frozen=True)
class ImageScores:
    """Network and real images that generated images are compared with.

    Args:
        judge: Folder, name or ``config.json`` of a vision model of transformers, whose features are compared. null: no
            scores.
        images: Number of training images to compare with.
    """

    judge: str | None = None
    images: int = 1000

    def __post_init__(self) -> None:
        check_number("ImageData", "scores.images", self.images, least=2, whole=True)


class ImageJudge:
    """Compares generated images with real images.

    Args:
        spec: Folder, name or ``config.json`` of the model. A ``config.json`` gives random weights (seed 0), which still
            tell distributions apart and are enough to try a config.
        owner: Class that uses the judge, for errors.

    Raises:
        ConfigurationError: If there is no such model.
    """

    def __init__(self, spec: str, owner: str) -> None:
        self._owner = owner
        self._teacher = find_teacher(spec, [""], who=owner)
        self._real: Tensor | None = None

    def set_real_images(self, real: Iterable[Tensor]) -> None:
        """Set the real images to compare with, each [C, H, W] in [-1, 1]. Their sizes may differ."""
        self._real = torch.cat([self.features(image[None]) for image in real])

    def features(self, images: Tensor) -> Tensor:
        """Return the features [B, D] of images [B, C, H, W] in [-1, 1]."""
        found = self._teacher.of_images(images)[""].float()
        if found.ndim == 3:  # [B, tokens, D]
            return found.mean(dim=1)
        if found.ndim == 4:  # [B, D, h, w]
            return found.mean(dim=(2, 3))
        if found.ndim != 2:
            raise ConfigurationError(
                f"{self._owner}: judge must give features [B, D] of images, not {list(found.shape)}. Name another "
                "model."
            )
        return found

    def distances(self, images: Tensor) -> dict[str, float]:
        """Return ``frechet_distance`` and ``kernel_distance`` of images [M, C, H, W] in [-1, 1], M >= 2."""
        assert self._real is not None, "set_real_images() comes first"
        generated = torch.cat([self.features(part) for part in images.cpu().float().split(32)])
        return distances_of_features(self._real, generated)

"""A frozen encoder's features of the clean images, for ``HiddenAlignment``: encoded with the latents, or live.

Stored or live they are rounded to the same number format, so that training sees the same numbers.

Cached, the encoder runs once and not in each step, for N x D numbers an image and variant: 256 tokens of DINOv2-B in
float16 are 393 kB, against 16 kB of SD's posterior.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from lit_efficient.data.latents.latent_format import StoredDtype
from lit_efficient.errors import check_choice, check_number
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, name_of

_WHO = "TeacherFeatures"


@dataclass(frozen=True)
class TeacherFeatures:
    """Which encoder's features come with the latents, as ``features`` of a batch.

    Args:
        teacher: The folder, hub name or ``config.json`` (random weights) of a transformers vision model; or
            ``data.NAME``, a network of the images' data module.
        layer: Pattern for its layer; ``""`` is its output (``last_hidden_state``).
        image_size: Side that images are resized to; None: as its configuration says.
        dtype: Number format that the features are kept in.
    """

    teacher: str
    layer: str = ""
    image_size: int | None = None
    dtype: StoredDtype = "float16"

    def __post_init__(self) -> None:
        check_number(_WHO, "image_size", self.image_size, least=1, whole=True, null=True)
        check_choice(_WHO, "dtype", self.dtype, get_args(StoredDtype))

    def find(self, images: Any) -> Teacher:
        """The encoder; ``data.NAME`` names a network of the data module ``images``."""
        return find_teacher(
            self.teacher, [self.layer], who=_WHO, data=images, image_size=self.image_size, argument="layer"
        )

    def identity(self, teacher: Teacher) -> dict[str, str]:
        """What the features depend on, by name. Where the encoder lies is not among it, its weights are."""
        return {
            "features.weights": name_of(teacher.network).rpartition(": ")[2],  # class and digest
            "features.layer": self.layer,
            "features.input": f"side {teacher.image_size}, mean and std {teacher.statistics}",
            "features.dtype": self.dtype,
        }


def stored_features(teacher: Teacher, images: Tensor, dtype: StoredDtype) -> Tensor:
    """Features of images [B, C, H, W] in [-1, 1] of the teacher's one layer, [B, N, D] or as it gives them, rounded."""
    (features,) = teacher.of_images(images).values()
    return features.to(getattr(torch, dtype))

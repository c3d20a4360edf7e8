"""Features of the clean images from a frozen encoder, for ``HiddenAlignment``: stored with the latents, or live.

Stored and live features are rounded to the same number format, so that training sees the same numbers.

With a cache the encoder runs once for each image and variant instead of in each step. The features take N x D numbers:
256 tokens of DINOv2-B in float16 are 393 kB, and the posterior of Stable Diffusion is 16 kB.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.data.latents.latent_format import StoredDtype
from lit_efficient.errors import check_number, checks_types
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, name_of

_WHO = "TeacherFeatures"


@checks_types
@dataclass(frozen=True)
class TeacherFeatures:
    """Encoder whose features come with the latents, as ``features`` of a batch.

    Args:
        teacher: Folder, hub name or ``config.json`` (random weights) of a vision model of transformers; or
            ``data.NAME``, a network of the DataModule of the images.
        layer: Pattern of the layer whose output is used. ``""`` is the output of the model (``last_hidden_state``).
        image_size: Height and width that images are resized to. null: the size in the configuration of the model.
        dtype: Number format of the features.
    """

    teacher: str
    layer: str = ""
    image_size: int | None = None
    dtype: StoredDtype = "float16"

    def __post_init__(self) -> None:
        check_number(_WHO, "image_size", self.image_size, least=1, whole=True, null=True)

    def find(self, images: object) -> Teacher:
        """Return the encoder. ``data.NAME`` is an attribute of the DataModule ``images``."""
        return find_teacher(
            self.teacher, [self.layer], who=_WHO, data=images, image_size=self.image_size, argument="layer"
        )

    def identity(self, teacher: Teacher) -> dict[str, str]:
        """Return all that the features depend on, by name: the weights of the encoder, but not their path."""
        return {
            "features.weights": name_of(teacher.network).rpartition(": ")[2],  # class and digest
            "features.layer": self.layer,
            "features.input": f"side {teacher.image_size}, mean and std {teacher.statistics}",
            "features.dtype": self.dtype,
        }


def stored_features(teacher: Teacher, images: Tensor, dtype: StoredDtype) -> Tensor:
    """Return the rounded features of images [B, C, H, W] in [-1, 1], as the layer gives them, such as [B, N, D]."""
    (features,) = teacher.of_images(images).values()
    return features.to(getattr(torch, dtype))

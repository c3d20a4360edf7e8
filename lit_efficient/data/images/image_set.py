"""Set of images of one kind: its captions, its role and weight in the loss, its crops, masks and conditions.

    loss of an epoch = mean over images of weight * loss + mean over class images of weight * loss

The second term is the prior preservation of DreamBooth, of sets with ``role: prior``. The ``loss_weight`` of a row in a
batch contains the shares of both terms: with N rows in an epoch, N_r of them of its role, it is weight * N / N_r.

Source: Ruiz et al. (2022), https://arxiv.org/abs/2208.12242.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_efficient.data.images.caption_rules import CaptionRules
from lit_efficient.data.images.class_images import ClassImages
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.errors import ConfigurationError, check_choice, check_number, checks_types, refusal

ALPHA = "alpha"
Role = Literal["train", "prior"]


@checks_types
@dataclass(frozen=True)
class ImageSet:
    """Set of images, and what they are used for.

    A mask or a condition is found in a folder under the name of its image with any suffix of images, or beside the
    image with an ending (``a-masklabel.png`` for ``a.jpg``, as for OneTrainer). It gets the crop and the flip of its
    image.

    Args:
        images: Images, named as ``train`` of ``ImageData``. null: those of ``generate`` alone.
        role: ``train``, or ``prior`` for class images of prior preservation, which are not validated on.
        captions: Folder of .txt files with the names of the images. null: they are beside the images, or in a column.
        prompt: Caption of images that have none.
        trigger: Word or phrase in front of each caption.
        repeats: Number of times that an epoch shows each image.
        weight: Weight of the images in the loss; for ``prior`` the weight of the prior.
        view: Crops and flips of this set. null: ``view`` of ``ImageData``.
        caption_rules: Variants of the captions. null: ``caption_rules`` of ``ImageData``.
        mask: Weight of each pixel in the loss, from black (0) to white (1): a folder; ``alpha``, the opacity of the
            images; ``masklabel``, files beside the images; or of a table or a stream, a column.
        generate: Class images that a pipeline makes for ``prompt`` where ``images`` has too few, for ``prior``.
        condition: Images that a network gets as a condition: a folder; ``condlabel``, files beside the images; or of a
            table or a stream, a column.
    """

    images: str | None = None
    role: Role = "train"
    captions: str | None = None
    prompt: str | None = None
    trigger: str | None = None
    repeats: int = 1
    weight: float = 1.0
    view: ImageView | None = None
    caption_rules: CaptionRules | None = None
    mask: str | None = None
    condition: str | None = None
    generate: ClassImages | None = None

    def __post_init__(self) -> None:
        check_choice("ImageData", "train.role", self.role, ("train", "prior"))
        check_number("ImageData", "train.repeats", self.repeats, least=1, whole=True)
        check_number("ImageData", "train.weight", self.weight, above=0)
        if self.images is None and self.generate is None:
            raise refusal("ImageData", "train.images", "a folder or a file, without generate", None)
        if self.generate is not None:
            fits = self.role == "prior" and self.prompt is not None and self.mask is None and self.condition is None
            if not fits:
                allowed = "null, except for role: prior with a prompt, and without mask and condition"
                raise refusal("ImageData", "train.generate", allowed, self.generate)
        for name in ("images", "captions", "trigger", "mask", "condition"):
            if getattr(self, name) == "":
                raise refusal("ImageData", f"train.{name}", "null or a text that is not empty", "")


def roles_of(sets: Sequence[ImageSet], weighted: bool) -> tuple[str, ...]:
    """Return the optional entries of the batches of some sets. ``weighted``: their images have weights.

    Raises:
        ConfigurationError: If some sets have a condition and others have none.
    """
    found = []
    if weighted:
        found.append("loss_weight")
    if any(one.mask is not None for one in sets):
        found.append("mask")
    lacking = [one.images for one in sets if one.condition is None]
    if len(lacking) < len(sets):
        if lacking:
            raise ConfigurationError(
                f"ImageData: {lacking[0]} has no condition, and other sets have one. Name its conditions, too."
            )
        found.append("condition")
    return tuple(found)

"""A small classifier of digits to judge generated ones: features for a Fréchet distance, a verdict for accuracy.

    Fréchet and kernel distances over its 32 features: see :mod:`lit_efficient.models.judges.sample_quality`

They are NOT the FID and the KID: those names belong to one particular Inception network. Values compare only with
values of the same judge; what held-out real digits score is the floor to read them against.
"""

import torch
from torch import Tensor

from lit_efficient.models.judges.sample_quality import feature_distances
from lit_efficient.models.networks.conv_features import ConvFeatures


class DigitFeatures(ConvFeatures):
    """The classifier for grey images of ten classes."""

    def __init__(self) -> None:
        super().__init__(channels=1, num_classes=10)


@torch.no_grad()
def judge_digits(judge: DigitFeatures, real: Tensor, images: Tensor, labels: Tensor | None) -> dict[str, float]:
    """Score generated digits [M, 1, H, W] beside real ones, M >= 2, by a trained classifier in evaluation mode.

    Returns:
        ``frechet_distance`` and ``kernel_distance`` (lower is better) and, with labels [M] of what each was meant to
        be, ``sample_accuracy``, the share that the judge reads as meant.
    """
    distances = feature_distances(judge, real, images)
    if labels is None:
        return distances
    accuracy = (judge.classify(images).argmax(dim=1) == labels).float().mean()
    return {**distances, "sample_accuracy": float(accuracy)}

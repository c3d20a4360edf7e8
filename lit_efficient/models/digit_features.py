"""A small classifier of digits to judge generated ones: features for a Fréchet distance, a verdict for accuracy.

    Fréchet and kernel distances over its 32 features: see :mod:`lit_efficient.models.sample_quality`

They are NOT the FID and the KID: those names belong to one particular Inception network. Values compare only with
values of the same judge; what held-out real digits score is the floor to read them against.
"""

import torch
from torch import Tensor, nn

from lit_efficient.models.sample_quality import feature_distances


class DigitFeatures(nn.Module):
    """Three strided convolutions, 32 features, and a linear head for ten classes."""

    num_features = 32  # the name that torchmetrics asks a feature network for

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, self.num_features),
            # Features of unit variance: a distance of d^2 reads as a shift of d standard deviations.
            nn.BatchNorm1d(self.num_features, affine=False),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(self.num_features, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 1, H, W] in [-1, 1] to features [B, 32]."""
        return self.body(images)

    def classify(self, images: Tensor) -> Tensor:
        """Images [B, 1, H, W] in [-1, 1] to logits [B, 10]."""
        return self.head(self.body(images))


@torch.no_grad()
def judge_digits(judge: DigitFeatures, real: Tensor, images: Tensor, labels: Tensor | None) -> dict[str, float]:
    """Score generated digits.

    Args:
        judge: A trained classifier, in evaluation mode.
        real: Real images to compare with, [N, 1, H, W] in [-1, 1].
        images: Generated images, [M, 1, H, W] in [-1, 1], M >= 2.
        labels: What each was meant to be, [M]; None if nothing was meant.

    Returns:
        ``frechet_distance`` and ``kernel_distance`` (lower is better) and, with labels, ``sample_accuracy``, the share
        that the judge reads as meant.
    """
    distances = feature_distances(judge, real, images)
    if labels is None:
        return distances
    accuracy = (judge.classify(images).argmax(dim=1) == labels).float().mean()
    return {**distances, "sample_accuracy": float(accuracy)}

"""Small image classifier whose features serve to compare sets of images.

    images -> three strided convolutions -> D features of unit variance -> ReLU -> linear head for the classes

Fréchet and kernel distances over these features (see :mod:`lit_efficient.models.judges.sample_quality`) are NOT FID and
KID: those names belong to one particular Inception network. Values are comparable only between runs with the same
network. The score of held-out real images is the lower limit to compare with.
"""

import torch
from torch import Tensor, nn

from lit_efficient.models.judges.sample_quality import distances_of_features


class ConvFeatures(nn.Module):
    """Classifier of three strided convolutions, 32 features and a linear head."""

    num_features = 32  # torchmetrics reads this attribute of a feature network

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, self.num_features),
            # With unit variance a distance of d^2 means a shift of d standard deviations.
            nn.BatchNorm1d(self.num_features, affine=False),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(self.num_features, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] in [-1, 1] to features [B, 32]."""
        return self.body(images)

    def classify(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] in [-1, 1] to logits [B, num_classes]."""
        return self.head(self.body(images))


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
    distances = distances_of_features(judge(real), judge(images))
    if labels is None:
        return distances
    accuracy = (judge.classify(images).argmax(dim=1) == labels).float().mean()
    return {**distances, "sample_accuracy": float(accuracy)}

"""A small classifier of images whose features serve to compare sets of images.

    images -> three strided convolutions -> D features of unit variance -> ReLU -> a linear head for the classes

Fréchet and kernel distances over the features (see :mod:`lit_efficient.models.judges.sample_quality`) are NOT the FID
and the KID: those names belong to one particular Inception network. Values compare only with values of the same
network; what held-out real images score is the floor to read them against.
"""

from torch import Tensor, nn


class ConvFeatures(nn.Module):
    """Three strided convolutions, 32 features, and a linear head."""

    num_features = 32  # the name that torchmetrics asks a feature network for

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
            # Features of unit variance: a distance of d^2 reads as a shift of d standard deviations.
            nn.BatchNorm1d(self.num_features, affine=False),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(self.num_features, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [-1, 1] to features [B, 32]."""
        return self.body(images)

    def classify(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [-1, 1] to logits [B, num_classes]."""
        return self.head(self.body(images))

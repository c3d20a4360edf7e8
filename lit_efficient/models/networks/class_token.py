"""Class token beside latents, noised and denoised together with them (REG), in one tensor.

    x = [latents; token]: rows of channels * width values after the rows of the latents, the last row padded with 0
    loss = mean (latents' error)^2 + weight * mean (token's error)^2

Noise, targets and samplers treat all values alike. They therefore take the joint tensor in the place of latents.
Source: Wu et al. (2025), https://arxiv.org/abs/2507.01467
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import check_number, checks_types


@checks_types
@dataclass(frozen=True)
class ClassToken:
    """Token of an image's content, in the features of an encoder, which is generated together with the image.

    Args:
        features: Length of the encoder's vector for an image, whose variance should be about 1; 0: no token.
        weight: Weight of the token's part of the loss; 0.03 in the paper.
    """

    features: int = 0
    weight: float = 0.03

    def __post_init__(self) -> None:
        check_number("ClassToken", "features", self.features, least=0, whole=True)
        check_number("ClassToken", "weight", self.weight, least=0)


def rows_of(features: int, channels: int, width: int) -> int:
    """Return the number of rows that a token takes after those of latents [B, channels, h, width]."""
    return -(-features // (channels * width))


def join_token(latents: Tensor, token: Tensor) -> Tensor:
    """Join latents [B, c, h, w] and a token [B, D] into one tensor [B, c, h + rows, w].

    Example:
        >>> join_token(torch.zeros(1, 2, 3, 3), torch.ones(1, 7)).shape
        torch.Size([1, 2, 5, 3])
    """
    batch, channels, _, width = latents.shape
    rows = rows_of(token.shape[1], channels, width)
    filled = F.pad(token, (0, rows * channels * width - token.shape[1]))
    return torch.cat([latents, filled.view(batch, channels, rows, width).to(latents.dtype)], 2)


def split_token(x: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Split the result of :func:`join_token` into latents [B, c, h, w] and token [B, features]."""
    rows = rows_of(features, x.shape[1], x.shape[3])
    return x[:, :, :-rows], x[:, :, -rows:].flatten(1)[:, :features]


class TokenPort(nn.Module):
    """Linear layers through which the token enters and leaves a transformer. Like the patches, it predicts zero at
    first.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.leave = nn.Linear(width, features)

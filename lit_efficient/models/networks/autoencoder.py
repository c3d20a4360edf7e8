"""Small convolutional autoencoder with a Gaussian latent, whose grid is 4 times smaller than the image on each side.

    q(z | x) = N(mean(x), exp(logvar(x)));    loss = |x - decode(z)|^2 + w * KL(q || N(0, 1))

A diffusion model then learns the latents, which have 16 times fewer positions than pixels. ``w`` is tiny (1e-4): it
keeps the latents' scale near one and smooth, but does not make N(0, 1) a distribution to sample latents from.

Costs: 50k parameters at the default width.
Source: Kingma and Welling (2013), https://arxiv.org/abs/1312.6114; in this role Rombach et al. (2022),
https://arxiv.org/abs/2112.10752.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import check_number, checks_types, refusal

FACTOR = 4  # pixels per latent position, on each side
_GROUPS = 4
# Within this range exp(0.5 * logvar) is a normal float32 number, and an outlier batch cannot overflow the KL.
_LOGVAR_RANGE = (-20.0, 6.0)


@checks_types
@dataclass(frozen=True)
class AutoencoderConfig:
    """Sizes of the autoencoder.

    Args:
        image_channels: Channels of the images; 1 is greyscale.
        latent_channels: Channels of the latents.
        width: Channels of the hidden layers next to the latents, a multiple of 8; layers at half resolution have half
            as many.
    """

    image_channels: int = 1
    latent_channels: int = 4
    width: int = 24

    def __post_init__(self) -> None:
        for name in ("image_channels", "latent_channels", "width"):
            check_number("AutoencoderConfig", name, getattr(self, name), least=1, whole=True)
        if self.width % (2 * _GROUPS):
            raise refusal("AutoencoderConfig", "width", f"a multiple of {2 * _GROUPS}", self.width)


def sample_posterior(mean: Tensor, logvar: Tensor | None, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``z = mean + exp(logvar / 2) * noise``, of the same shape.

    Args:
        mean: Means, any shape.
        logvar: Logarithms of the variances, the same shape. None belongs to a deterministic encoder: the mean is
            returned, and nothing is drawn.
        generator: Source of the noise; None is torch's global generator. A CPU generator works for every device.
    """
    if logvar is None:
        return mean
    if generator is None:
        noise = torch.randn_like(mean)
    else:
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=mean.dtype).to(mean.device)
    return mean + torch.exp(0.5 * logvar) * noise


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return the KL divergence from ``N(mean, exp(logvar))`` to ``N(0, 1)`` in nats, averaged over all elements (a
    scalar).
    """
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()


def check_images(images: Tensor, autoencoder: Any, who: str) -> None:
    """Refuse images whose channels are not the autoencoder's, or whose sides its factor does not divide.

    Raises:
        ConfigurationError: Naming the allowed and the given shape.
    """
    channels, factor = autoencoder.image_channels, autoencoder.factor
    if images.ndim != 4 or images.shape[1] != channels or images.shape[2] % factor or images.shape[3] % factor:
        allowed = f"[B, {channels}, H, W] with height and width multiples of {factor}"
        raise refusal(who, "images", allowed, tuple(images.shape))


class _Residual(nn.Module):
    """Two 3x3 convolutions around a skip connection: [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(_GROUPS, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(_GROUPS, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Autoencoder(nn.Module):
    """Encoder and decoder between images [B, C, H, W] in [-1, 1] and latents [B, c, H / 4, W / 4]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.image_channels = config.image_channels
        self.latent_channels = config.latent_channels
        self.factor = FACTOR
        self.source: Any = None  # see `ImageAutoencoder`
        wide = config.width
        narrow = config.width // 2
        latent = config.latent_channels
        self.encoder = nn.Sequential(
            nn.Conv2d(config.image_channels, narrow, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(narrow, wide, 3, stride=2, padding=1),
            _Residual(wide),
            nn.Conv2d(wide, 2 * latent, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(latent, wide, 3, padding=1),
            _Residual(wide),
            # Upsampling after the convolution takes 0.6 of the time of upsampling first, and costs 1 dB on the digits.
            nn.Conv2d(wide, 4 * wide, 3, padding=1),
            nn.PixelShuffle(2),
            nn.SiLU(),
            nn.Conv2d(wide, narrow, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(narrow, 4 * config.image_channels, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map images [B, C, H, W], sides multiples of 4, to mean and logvar of the posterior, [B, c, H / 4, W / 4]."""
        check_images(x, self, "Autoencoder")
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        return mean, logvar.clamp(*_LOGVAR_RANGE)

    def decode(self, z: Tensor) -> Tensor:
        """Map latents [B, c, h, w] to images [B, C, 4 h, 4 w], about in [-1, 1] (not clamped)."""
        return self.decoder(z)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction from one posterior sample, mean and logvar of images."""
        mean, logvar = self.encode(x)
        return self.decode(sample_posterior(mean, logvar, generator)), mean, logvar


def autoencoder_loss(
    model: nn.Module, images: Tensor, kl_weight: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (mean squared error per pixel plus ``kl_weight`` times the mean KL), the error and the KL.

    Args:
        model: An ``Autoencoder``.
        images: [B, C, H, W] in [-1, 1].
        kl_weight: Weight of the mean KL per latent element, >= 0.
        generator: As in ``sample_posterior``.

    Returns:
        Three scalars.
    """
    reconstruction, mean, logvar = model(images, generator)
    error = (reconstruction - images).square().mean()
    kl = kl_divergence(mean, logvar)
    return error + kl_weight * kl, error, kl

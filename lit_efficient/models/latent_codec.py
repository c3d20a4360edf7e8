"""A trained autoencoder with the statistics of its latents: what turns a diffusion model's output back into images.

A diffusion model wants inputs of zero mean and unit variance. Autoencoders do not give them (standard deviations of 0.9
to 2.0 and means of -0.2 to 1.1 were measured on the digits), so each channel is shifted and scaled as measured.
"""

import hashlib
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lit_efficient.models.autoencoder import Autoencoder, AutoencoderConfig


class LatentCodec:
    """Frozen autoencoder plus per-channel mean and standard deviation of its sampled latents.

    Deliberately no ``nn.Module``: a LightningModule that holds one neither trains it nor counts, averages, quantises or
    shards it, and its checkpoint's ``state_dict`` is the diffusion model's alone.

    Args:
        autoencoder: The trained model; it is frozen and put in evaluation mode.
        mean: Per-channel mean of sampled latents, [c].
        std: Per-channel standard deviation of sampled latents, [c].
    """

    def __init__(self, autoencoder: Autoencoder, mean: Tensor, std: Tensor) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self.mean = mean.detach().float().cpu()
        self.std = std.detach().float().cpu()

    def normalize(self, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior moments [B, c, h, w] of the autoencoder to those of the normalised latents."""
        shift, scale = self._statistics(mean)
        return (mean - shift) / scale, logvar - 2.0 * scale.log()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, c, h, w] to images [B, C, H, W], float32, clamped to [-1, 1]."""
        latents = latents.float()
        shift, scale = self._statistics(latents)
        return self.autoencoder.to(latents.device).decode(latents * scale + shift).clamp(-1.0, 1.0)

    def fingerprint(self) -> str:
        """SHA-256 of the weights and the statistics: two codecs with the same one share a latent space."""
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.autoencoder.state_dict(), "mean": self.mean, "std": self.std}.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors only: it loads with ``weights_only=True``."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.autoencoder.state_dict().items()}
        return {"config": asdict(self.autoencoder.config), "weights": weights, "mean": self.mean, "std": self.std}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "LatentCodec":
        """The codec that ``state_dict`` was taken from. Draws no random number."""
        with torch.device("meta"):
            autoencoder = Autoencoder(AutoencoderConfig(**state["config"]))
        autoencoder.load_state_dict(state["weights"], assign=True)
        return cls(autoencoder, state["mean"], state["std"])

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean.view(1, -1, 1, 1).to(like), self.std.view(1, -1, 1, 1).to(like)

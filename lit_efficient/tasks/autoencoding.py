"""Train an autoencoder on images: squared error plus a small KL term.

    fit --model Autoencoding --data DigitImages

Latent diffusion on the digits does this by itself as its stage one; this task is for watching, tuning and reusing it.
"""

from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.autoencoder import Autoencoder, AutoencoderConfig, autoencoder_loss

_VALIDATION_SEED = 1_000_003


class Autoencoding(LightningModule):
    """An autoencoder under training. Batches are dictionaries with "images" [B, C, H, W] in [-1, 1].

    Args:
        autoencoder: Shape of the network.
        kl_weight: Weight of the mean KL per latent element, >= 0.
        learning_rate: AdamW's rate, > 0.
    """

    def __init__(
        self,
        autoencoder: AutoencoderConfig = AutoencoderConfig(),  # noqa: B008 (frozen)
        kl_weight: float = 1e-4,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        if isinstance(autoencoder, dict):  # as a checkpoint stores it
            autoencoder = AutoencoderConfig(**autoencoder)
        if not kl_weight >= 0:
            raise ConfigurationError(f"Autoencoding: kl_weight must be >= 0, not {kl_weight!r}.")
        if not learning_rate > 0:
            raise ConfigurationError(f"Autoencoding: learning_rate must be > 0, not {learning_rate!r}.")
        # Primitives only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters(
            {"autoencoder": asdict(autoencoder), "kl_weight": kl_weight, "learning_rate": learning_rate}
        )
        self.config = autoencoder
        self.kl_weight = kl_weight
        self.learning_rate = learning_rate
        self.autoencoder: Autoencoder | None = None

    def configure_model(self) -> None:
        """Build the network, once."""
        if self.autoencoder is None:
            self.autoencoder = Autoencoder(self.config)

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images [B, C, H, W] through the posterior's mean."""
        assert self.autoencoder is not None
        return self.autoencoder.decode(self.autoencoder.encode(images)[0])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss through one posterior sample an image, drawn from the global generator."""
        assert self.autoencoder is not None
        loss, error, kl = autoencoder_loss(self.autoencoder, batch["images"], self.kl_weight)
        size = len(batch["images"])
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        self.log_dict({"train/error": error, "train/kl": kl}, batch_size=size)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The same draws at every validation."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As validation."""
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Reconstructions."""
        return self(batch["images"])

    def configure_optimizers(self) -> Any:
        """AdamW with a linear decay to zero over the run, if its length is known."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, self.learning_rate)
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, stage: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.autoencoder is not None
        images = batch["images"]
        generator = torch.Generator().manual_seed(_VALIDATION_SEED + batch_idx)
        loss, _, _ = autoencoder_loss(self.autoencoder, images, self.kl_weight, generator)
        error = (self(images) - images).square().mean()
        psnr = 10.0 * torch.log10(4.0 / error)  # the range of the pixels is 2
        self.log_dict({f"{stage}/loss": loss, f"{stage}/psnr_db": psnr}, batch_size=len(images), sync_dist=True)

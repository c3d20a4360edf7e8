"""Train an autoencoder on images: reconstruction error, a small KL term, and an optional perceptual distance.

    loss = d(x, decode(z)) + kl_weight KL(q || N(0, 1)) + w_p d_features(x, decode(z)),    z ~ q(z | x)

d is a distance of pixels: squared, absolute or smooth. The encoder of this package and AutoencoderKL of diffusers give
a distribution q. AutoencoderTiny and AutoencoderDC are deterministic: z = encode(x), without a KL term. The VF loss is
a
technique: `LatentAlignment`.

    fit --model Autoencoding --data DigitImages

Latent diffusion on the digits trains its autoencoder itself. This task is for other images, for fine-tuning, and for
logging. `build_autoencoder` only needs its checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_efficient.distributed.seeds import seed_rank
from lit_efficient.errors import CheckpointError, ChecksTypes, ConfigurationError, check_number, refusal
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.models.judges.perceptual import Perceptual, find_network, perceptual_distance, pixel_distance
from lit_efficient.models.libraries.autoencoders import (
    CHECKPOINT_KEY,
    DiffusersAutoencoder,
    as_spec,
    build_autoencoder,
    description,
    is_deterministic,
    stored_config,
)
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, from_fields
from lit_efficient.models.libraries.teachers import Teacher, name_of
from lit_efficient.models.networks.autoencoder import AutoencoderConfig, kl_divergence, sample_posterior
from lit_efficient.optimizers.fused_adamw import FusedAdamW
from lit_efficient.surgery import own_draws

Reconstruction = Literal["l1", "l2", "smooth"]
_VALIDATION_SEED = 1_000_003
_KL_WEIGHT = 1e-4
_SHOWN = 64  # most images of the first validation batch that `sample_images` can show


class Autoencoding(ChecksTypes, LightningModule):
    """Training of an autoencoder. Batches are dictionaries with "images" [B, C, H, W] in [-1, 1].

    Random weights are drawn on the device of the run, so a GPU and a CPU give different weights for one seed.

    Args:
        autoencoder: Shape of this package's autoencoder, or a model of diffusers (AutoencoderKL, AutoencoderTiny or
            AutoencoderDC) with pretrained or random weights.
        kl_weight: Weight of the mean KL per latent element, >= 0. null takes 1e-4, or 0 for a deterministic encoder.
        learning_rate: Learning rate of AdamW, > 0.
        reconstruction: Distance of pixels: l2 (squared), l1, or smooth (Huber, quadratic up to 0.1).
        perceptual: Additional distance in the features of a frozen network. null for none.
    """

    trains_on: ClassVar[tuple[str, ...]] = ("images",)

    def __init__(
        self,
        autoencoder: AutoencoderConfig | DiffusersModelConfig = AutoencoderConfig(),  # noqa: B008 (frozen)
        kl_weight: float | None = None,
        learning_rate: float = 3e-3,
        reconstruction: Reconstruction = "l2",
        perceptual: Perceptual | None = None,
    ) -> None:
        super().__init__()
        if isinstance(autoencoder, dict):  # from a checkpoint
            autoencoder = as_spec(autoencoder)
        if isinstance(perceptual, dict):
            perceptual = Perceptual(**perceptual)
        check_number("Autoencoding", "kl_weight", kl_weight, least=0, null=True)
        check_number("Autoencoding", "learning_rate", learning_rate, above=0)
        # Primitives only, so that checkpoints load with weights_only=True.
        kept = None
        if perceptual is not None:
            kept = {**vars(perceptual), "network": name_of(perceptual.network)}
        self.save_hyperparameters(
            {
                "autoencoder": asdict(autoencoder),
                "kl_weight": kl_weight,
                "learning_rate": learning_rate,
                "reconstruction": reconstruction,
                "perceptual": kept,
            }
        )
        self.config = autoencoder
        self.kl_weight = kl_weight
        self.learning_rate = learning_rate
        self.reconstruction = reconstruction
        self.perceptual = perceptual
        self._named = isinstance(autoencoder, DiffusersModelConfig) and autoencoder.name_or_path is not None
        if not self._named:
            self._check_kind()  # the config of a name is only read when the network is built
        self.autoencoder: Any = None
        self._features: Teacher | None = None
        self._shown: Tensor | None = None

    def configure_model(self) -> None:
        if self.autoencoder is None:
            try:
                self._check_kind()
                self.autoencoder = build_autoencoder(self.config)
            except ConfigurationError:
                if trainer_of(self) is not None or not self._named:
                    raise
                return  # `on_load_checkpoint` builds it from the checkpoint, without the folder
            self.autoencoder.source = None  # training makes the weights differ from those of the source
        if self.perceptual is not None and self._features is None and trainer_of(self) is not None:
            data = getattr(self.trainer, "datamodule", None)
            self._features = find_network(self.perceptual, self.autoencoder.image_channels, data, "Autoencoding")

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images [B, C, H, W] from the mean of the posterior."""
        assert self.autoencoder is not None, "configure_model() builds the network"
        return self.autoencoder.decode(self.autoencoder.encode(images)[0])

    def on_train_start(self) -> None:
        super().on_train_start()
        seed_rank(data_rank(self.trainer))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss for one sample of each image's posterior, drawn from the global generator."""
        images = _images(batch)
        mean, logvar = self.autoencoder.encode(images)
        decoded = self.autoencoder.decode(sample_posterior(mean, logvar))
        terms = self._losses(images, decoded, mean, logvar)
        loss = terms.pop("loss")
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss), batch_size=len(images))
        self.log_dict({f"train/{name}": value for name, value in terms.items()}, batch_size=len(images))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(_images(batch))

    def sample_images(self, num: int, seed: int) -> Tensor:
        """Return images of the first validation batch, each followed by its reconstruction from the posterior's mean.

        Args:
            num: Number of images in all, of which half are reconstructions; at least one pair is returned. An even
                number of columns in a grid puts each pair side by side.
            seed: Not used.

        Returns:
            [2 n, C, H, W] in [-1, 1], on the CPU.

        Raises:
            ConfigurationError: If no validation batch has been seen yet.
        """
        if self._shown is None:
            raise ConfigurationError("Autoencoding: sample_images shows images of the validation data: validate first")
        originals = self._shown[: max(1, num // 2)]
        reconstructions = self(originals.to(self.device)).float().cpu()
        return torch.stack((originals.float(), reconstructions.clamp(-1.0, 1.0)), dim=1).flatten(0, 1)

    def image_captions(self, num: int) -> list[str]:
        """Return a caption for each of :meth:`sample_images`."""
        return ["original", "reconstruction"] * (num // 2)

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a linear decay to zero over the run if its length is known."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = FusedAdamW(trainable, self.learning_rate)
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the whole config, so that the checkpoint is enough to build the autoencoder."""
        checkpoint[CHECKPOINT_KEY] = stored_config(self.autoencoder)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if its source is missing. Raise CheckpointError for weights of another autoencoder."""
        stored = checkpoint.get(CHECKPOINT_KEY)
        if stored is None:
            return
        if self.autoencoder is None and "_class_name" in stored:
            with own_draws():  # the random weights are replaced later
                network: Any = from_fields(stored)
            dtype = None
            if isinstance(self.config, DiffusersModelConfig):
                dtype = getattr(torch, self.config.dtype)
            # `to` of diffusers would warn about 16-bit weights on a CPU.
            self.autoencoder = DiffusersAutoencoder(torch.nn.Module.to(network, dtype))
        ours = stored_config(self.autoencoder)
        if description(ours) != description(stored):
            raise CheckpointError(
                f"Autoencoding: the checkpoint contains another autoencoder: {description(stored)}, not "
                f"{description(ours) or ours}"
            )

    def _check_kind(self) -> None:
        """Raise ConfigurationError for anything but an image autoencoder, and for a KL term without a distribution."""
        if is_deterministic(self.config) and self.kl_weight:
            described = getattr(self.config, "described", "")
            allowed = f"0 or null for {described}, a deterministic encoder, whose latents have no variance"
            raise refusal("Autoencoding", "kl_weight", allowed, self.kl_weight)

    def _losses(self, images: Tensor, decoded: Tensor, mean: Tensor, logvar: Tensor | None) -> dict[str, Tensor]:
        """Return the loss, and its terms without weights, by name."""
        error = pixel_distance(decoded, images, self.reconstruction)
        terms = {"loss": error, "error": error.detach()}
        if logvar is not None:
            kl = kl_divergence(mean.float(), logvar.float())
            weight = _KL_WEIGHT if self.kl_weight is None else self.kl_weight
            terms["loss"] = terms["loss"] + weight * kl
            terms["kl"] = kl.detach()
        if self.perceptual is not None and self._features is not None:
            self._features.to(self.device)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.perceptual.weight > 0):
                seen = perceptual_distance(self._features, decoded, images)
            if self.perceptual.weight > 0:
                terms["loss"] = terms["loss"] + self.perceptual.weight * seen
            terms["perceptual"] = seen.detach()
        return terms

    def _evaluate(self, stage: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        images = _images(batch)
        if stage == "val" and batch_idx == 0:
            self._shown = images[:_SHOWN].detach().cpu()
        generator = torch.Generator().manual_seed(_VALIDATION_SEED + batch_idx)
        mean, logvar = self.autoencoder.encode(images)
        decoded = self.autoencoder.decode(sample_posterior(mean, logvar, generator))
        terms = self._losses(images, decoded, mean, logvar)
        through_mean = decoded
        if logvar is not None:  # `decoded` is of a sample of the posterior
            through_mean = self.autoencoder.decode(mean)
        error = pixel_distance(through_mean, images, "l2")
        psnr = 10.0 * torch.log10(4.0 / error)  # pixels have the range 2
        figures = {f"{stage}/loss": terms["loss"], f"{stage}/psnr_db": psnr}
        if "perceptual" in terms:
            figures[f"{stage}/perceptual"] = terms["perceptual"]
        self.log_dict(figures, batch_size=len(images), sync_dist=True)


def _images(batch: object) -> Tensor:
    if not isinstance(batch, Mapping) or "images" not in batch:
        has = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise refusal("Autoencoding", "batches", "dictionaries with 'images'", has)
    return batch["images"]

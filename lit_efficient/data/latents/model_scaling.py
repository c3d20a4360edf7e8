"""Scaling of latents that the trained network expects because its pipeline declares it."""

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_efficient.errors import ConfigurationError


def pipeline_scaling(data: LightningDataModule, channels: int) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation [c] of latents by the pipeline of the network that is trained.

    ``None`` without a trainer, and for a module or a network without a pipeline.

    Raises:
        ConfigurationError: If the pipeline's latents have another number of channels.
    """
    module = None if data.trainer is None else data.trainer.lightning_module
    scaling = getattr(module, "latent_scaling", None)
    if scaling is None:
        return None
    mean, std = scaling
    if len(mean) != channels:
        raise ConfigurationError(
            f"{type(data).__name__}: the latents have {channels} channels, and those of the network's pipeline "
            f"{len(mean)}: name the pipeline's autoencoder"
        )
    return torch.tensor(mean), torch.tensor(std)

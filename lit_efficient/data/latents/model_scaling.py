"""Scaling of latents and encoders that the trained network expects because its pipeline has them."""

from dataclasses import replace

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.pipeline_folder import pipeline_index, pipeline_root, text_kind
from lit_efficient.models.libraries.text_encoder import TextEncoderConfig


def pipeline_encoders(
    data: LightningDataModule, backbone: DiffusersModelConfig | None
) -> tuple[DiffusersModelConfig, TextEncoderConfig | None]:
    """Return the autoencoder, and the text encoders if there are any, of the pipeline of the network that is trained.

    Frozen text encoders have the number format of the network, as in the training scripts of diffusers: with a network
    in bfloat16, T5-XXL takes half of the memory. The autoencoder and text encoders that train are in float32.

    Args:
        data: The data module.
        backbone: The network; ``None`` takes that of the trainer's module.

    Raises:
        ConfigurationError: If the network does not come from a pipeline.
    """
    if backbone is None and data.trainer is not None:
        backbone = getattr(data.trainer.lightning_module, "backbone", None)
    index = None
    if isinstance(backbone, DiffusersModelConfig) and not backbone.draws_weights:
        place, _ = pipeline_root(backbone.place, backbone.subfolder)
        index = pipeline_index(place, backbone.revision)
    if index is None:
        raise ConfigurationError(
            f"{type(data).__name__}: autoencoder may be left out only where the trained network comes from a pipeline "
            "(model.init_args.backbone.name_or_path): name one"
        )
    assert isinstance(backbone, DiffusersModelConfig)
    if backbone.config is None:
        backbone = replace(backbone, name_or_path=place)
    text = None
    if text_kind(index) is not None:
        module = None if data.trainer is None else data.trainer.lightning_module
        trains = getattr(module, "text_training", None) is not None
        text = TextEncoderConfig(
            backbone.name_or_path,
            config=backbone.config,
            revision=backbone.revision,
            variant=backbone.variant,
            dtype="float32" if trains else backbone.dtype,
        )
    return replace(backbone, subfolder="vae", config_fields=None, dtype="float32"), text


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

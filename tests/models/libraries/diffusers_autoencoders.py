"""diffusers' three kinds of image autoencoders, built small from real configurations, by name."""

from __future__ import annotations

from typing import Any

import torch

from lit_efficient import DiffusersModelConfig
from lit_efficient.models.libraries.autoencoders import DiffusersAutoencoder, build_autoencoder

KL: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 3,
    "sample_size": 16,
    "scaling_factor": 0.5,
    "shift_factor": 0.25,
}
TINY: dict[str, Any] = {
    "_class_name": "AutoencoderTiny",
    "in_channels": 1,
    "out_channels": 1,
    "encoder_block_out_channels": [8, 8, 8],
    "decoder_block_out_channels": [8, 8, 8],
    "num_encoder_blocks": [1, 1, 1],
    "num_decoder_blocks": [1, 1, 1],
    "latent_channels": 3,
}
DC: dict[str, Any] = {
    "_class_name": "AutoencoderDC",
    "in_channels": 1,
    "latent_channels": 4,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [8, 8, 16],
    "decoder_block_out_channels": [8, 8, 16],
    "encoder_layers_per_block": [0, 1, 1],
    "decoder_layers_per_block": [0, 1, 1],
    "encoder_qkv_multiscales": [[], [], [5]],
    "decoder_qkv_multiscales": [[], [], [5]],
    "scaling_factor": 0.4,
}
KINDS = {"AutoencoderKL": KL, "AutoencoderTiny": TINY, "AutoencoderDC": DC}


def small(fields: dict[str, Any], seed: int = 0, **changed: Any) -> DiffusersAutoencoder:
    """One with random weights of a seed, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = build_autoencoder(DiffusersModelConfig(config_fields={**fields, **changed}))
    assert isinstance(made, DiffusersAutoencoder)
    return made.eval()


def images(count: int = 2, height: int = 16, width: int = 24, seed: int = 0) -> torch.Tensor:
    """Random pixels, wider than high."""
    return torch.rand(count, 1, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1

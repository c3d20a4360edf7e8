"""The authors' names of layers, by diffusers' converters of whole checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils as files
from torch import Tensor, nn

from lit_efficient.models.libraries.diffusers_model import from_fields
from lit_efficient.models.libraries.original_names import original_layers
from tests.models.libraries.test_backbones import CONDITIONED, FLUX, PIXART, SD3, SDXL

UNETS = {
    "sd15": {"down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "cross_attention_dim": 768},
    "sdxl": {
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "use_linear_projection": True,
        "cross_attention_dim": 2048,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


def numbered(network: nn.Module) -> dict[str, Tensor]:
    """One number for the rows of each layer, so that every tensor differs from the others; no memory on real sizes."""
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    found = {}
    for number, (name, part) in enumerate(layers.items()):
        rows = part.weight.shape[0]
        found[name] = number + torch.arange(rows) / rows
    return found


def original_weights(network: nn.Module, rows: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Those rows as weights and biases under the authors' names."""
    found = {}
    for layer in original_layers(network):
        stacked = torch.cat([rows[part] for part in layer.parts])
        if layer.swapped:
            stacked = torch.cat(stacked.chunk(2)[::-1])
        found |= {f"{prefix}{layer.name}.weight": stacked, f"{prefix}{layer.name}.bias": stacked}
    return found


@pytest.mark.parametrize("name", UNETS)
def test_a_unet_of_real_size(name: str) -> None:
    with torch.device("meta"):
        network: Any = from_fields({"_class_name": "UNet2DConditionModel", **UNETS[name]})
    rows = numbered(network)
    given = original_weights(network, rows, "model.diffusion_model.")
    assert len(given) == 2 * len(rows)
    converted = files.convert_ldm_unet_checkpoint(given, network.config)
    assert all(torch.equal(converted[f"{key}.weight"], value) for key, value in rows.items())


@pytest.mark.parametrize("fields", [CONDITIONED, SDXL], ids=["sd15", "sdxl"])
def test_a_tiny_unet(fields: dict[str, Any]) -> None:
    network: Any = from_fields(fields)
    rows = numbered(network)
    converted = files.convert_ldm_unet_checkpoint(
        original_weights(network, rows, "model.diffusion_model."), network.config
    )
    assert all(torch.equal(converted[f"{key}.weight"], value) for key, value in rows.items())


def test_sd3_with_a_second_attention() -> None:
    network: Any = from_fields({**SD3, "num_layers": 3, "dual_attention_layers": [0], "qk_norm": "rms_norm"})
    rows = numbered(network)
    given = original_weights(network, rows)
    given["pos_embed"] = torch.zeros(1)
    given["context_embedder.weight"] = network.context_embedder.weight  # gives the width of captions
    for name, _ in network.named_modules():
        if name.endswith(("norm_q", "norm_k", "norm_added_q", "norm_added_k")):
            block, attention, norm = name.split(".")[1:]
            side = "context_block" if "added" in norm else "x_block"
            given[f"joint_blocks.{block}.{side}.{attention}.ln_{norm[-1]}.weight"] = torch.zeros(1)
    converted = files.convert_sd3_transformer_checkpoint_to_diffusers(given)
    for key, value in rows.items():
        if key != "context_embedder":
            assert torch.equal(converted[f"{key}.weight"], value), key


def test_flux_of_real_width() -> None:
    with torch.device("meta"):
        fields = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
        network: Any = from_fields({**fields, "guidance_embeds": True})
    rows = numbered(network)
    given = original_weights(network, rows)
    for block in ("double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"):
        for name in ("query_norm", "key_norm"):
            given[f"{block}.norm.{name}.scale"] = torch.zeros(1)
    converted = files.convert_flux_transformer_checkpoint_to_diffusers(given)
    assert all(torch.equal(converted[f"{key}.weight"], value) for key, value in rows.items())
    assert {key for key in converted if key.endswith(".weight") and "norm_" not in key} == {
        f"{key}.weight" for key in rows if key != "norm_out.linear"
    }


def test_others_have_none() -> None:
    assert original_layers(from_fields(PIXART)) == []
    assert original_layers(nn.Linear(2, 2)) == []
    assert len(original_layers(from_fields(FLUX))) > 0

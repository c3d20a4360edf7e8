"""SD3 and Flux in one file, as ComfyUI and civitai have them, give the predictions of their pipelines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_efficient import ConfigurationError, DiffusersModelConfig, LatentDiffusion, Samples
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from tests import tiny_pipelines
from tests.tasks.test_pipeline_predictions import check_predictions, original_vae

MODEL = "model.diffusion_model"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def sd3() -> Any:
    """Return SD3 as its authors publish it: the projection of CLIP-L is not in the file, but the identity."""
    torch.manual_seed(0)
    pipeline = tiny_pipelines.sd3()
    clip = pipeline.text_encoder
    clip.config.projection_dim = 16
    clip.text_projection = nn.Linear(16, 16, bias=False)
    nn.init.eye_(clip.text_projection.weight)
    pipeline.register_modules(
        transformer=tiny_pipelines.network(
            tiny_pipelines.SD3 | {"joint_attention_dim": 48, "pooled_projection_dim": 16 + 6}
        )
    )
    return pipeline


def layers(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Return weight and bias of the layers of diffusers, stacked."""
    kinds = [kind for kind in ("weight", "bias") if f"{names[0]}.{kind}" in state]
    return {kind: torch.cat([state[f"{name}.{kind}"] for name in names]) for kind in kinds}


def swapped(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return shift and scale in the place of scale and shift."""
    return {kind: torch.cat(tensor.chunk(2)[::-1]) for kind, tensor in parts.items()}


def of_sd3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the transformer of SD3 under the names of its authors."""
    found = {"x_embedder.proj": layers(state, "pos_embed.proj"), "context_embedder": layers(state, "context_embedder")}
    for ours, theirs in {"timestep": "t", "text": "y"}.items():
        for number in (1, 2):
            old = f"time_text_embed.{ours}_embedder.linear_{number}"
            found[f"{theirs}_embedder.mlp.{2 * number - 2}"] = layers(state, old)
    found["final_layer.linear"] = layers(state, "proj_out")
    found["final_layer.adaLN_modulation.1"] = swapped(layers(state, "norm_out.linear"))
    count = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks."))
    for i in range(count):
        old, new = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        found[f"{new}.x_block.attn.qkv"] = layers(state, *(f"{old}.attn.to_{one}" for one in "qkv"))
        found[f"{new}.context_block.attn.qkv"] = layers(state, *(f"{old}.attn.add_{one}_proj" for one in "qkv"))
        context = layers(state, f"{old}.norm1_context.linear")
        last = i == count - 1
        found[f"{new}.context_block.adaLN_modulation.1"] = swapped(context) if last else context
        names = {"x_block.attn.proj": "attn.to_out.0", "x_block.adaLN_modulation.1": "norm1.linear"}
        names |= {"x_block.mlp.fc1": "ff.net.0.proj", "x_block.mlp.fc2": "ff.net.2"}
        if not last:
            names |= {"context_block.attn.proj": "attn.to_add_out"}
            names |= {"context_block.mlp.fc1": "ff_context.net.0.proj", "context_block.mlp.fc2": "ff_context.net.2"}
        found |= {f"{new}.{name}": layers(state, f"{old}.{ours}") for name, ours in names.items()}
    flat = {f"{MODEL}.{name}.{kind}": part for name, parts in found.items() for kind, part in parts.items()}
    return flat | {f"{MODEL}.pos_embed": state["pos_embed.pos_embed"]}


def of_flux(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the transformer of Flux under the names of its authors."""
    found = {"img_in": layers(state, "x_embedder"), "txt_in": layers(state, "context_embedder")}
    for ours, theirs in {"timestep": "time", "text": "vector", "guidance": "guidance"}.items():
        for number, end in ((1, "in_layer"), (2, "out_layer")):
            found[f"{theirs}_in.{end}"] = layers(state, f"time_text_embed.{ours}_embedder.linear_{number}")
    found["final_layer.linear"] = layers(state, "proj_out")
    found["final_layer.adaLN_modulation.1"] = swapped(layers(state, "norm_out.linear"))
    scales = {}
    for i in sorted({name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}):
        old, new = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for side, ff, norm, qkv, out in (
            ("img", "ff", "norm1", "attn.to_{}", "attn.to_out.0"),
            ("txt", "ff_context", "norm1_context", "attn.add_{}_proj", "attn.to_add_out"),
        ):
            found[f"{new}.{side}_attn.qkv"] = layers(state, *(f"{old}.{qkv.format(one)}" for one in "qkv"))
            found[f"{new}.{side}_attn.proj"] = layers(state, f"{old}.{out}")
            found[f"{new}.{side}_mod.lin"] = layers(state, f"{old}.{norm}.linear")
            found[f"{new}.{side}_mlp.0"] = layers(state, f"{old}.{ff}.net.0.proj")
            found[f"{new}.{side}_mlp.2"] = layers(state, f"{old}.{ff}.net.2")
            for one, whole in (("q", "query"), ("k", "key")):
                ours = f"{old}.attn.norm_{'added_' if side == 'txt' else ''}{one}.weight"
                scales[f"{MODEL}.{new}.{side}_attn.norm.{whole}_norm.scale"] = state[ours]
    for i in sorted({name.split(".")[1] for name in state if name.startswith("single_transformer_blocks.")}):
        old, new = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        found[f"{new}.modulation.lin"] = layers(state, f"{old}.norm.linear")
        found[f"{new}.linear1"] = layers(state, *(f"{old}.attn.to_{one}" for one in "qkv"), f"{old}.proj_mlp")
        found[f"{new}.linear2"] = layers(state, f"{old}.proj_out")
        for one, whole in (("q", "query"), ("k", "key")):
            scales[f"{MODEL}.{new}.norm.{whole}_norm.scale"] = state[f"{old}.attn.norm_{one}.weight"]
    flat = {f"{MODEL}.{name}.{kind}": part for name, parts in found.items() for kind, part in parts.items()}
    return flat | scales


def one_file(pipeline: Any, transformer: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Return the weights of a pipeline as ComfyUI stores them. ``names``: those of encoders by their parts."""
    found = dict(transformer)
    found |= {f"first_stage_model.{name}": tensor for name, tensor in original_vae(pipeline.vae).items()}
    for part, name in names.items():
        for key, tensor in getattr(pipeline, part).state_dict().items():
            clip = "clip" in name and key != "text_projection.weight"
            whole = f"text_model.{key.removeprefix('text_model.')}" if clip else key
            if (name, whole) != ("clip_l", "text_projection.weight"):
                found[f"text_encoders.{name}.transformer.{whole}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def configs_of(pipeline: Any, folder: Path) -> Path:
    """Write a pipeline, and return a copy of its folder without weights."""
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder / "whole")
    shutil.copytree(folder / "whole", folder / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder / "configs"


def test_sd3_in_one_file(tmp_path: Path) -> None:
    pipeline = sd3()
    configs = str(configs_of(pipeline, tmp_path))
    file = str(tmp_path / "sd3_medium_incl_clips_t5xxl.safetensors")
    encoders = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}
    save_file(one_file(pipeline, of_sd3(pipeline.transformer.state_dict()), encoders), file)
    module = LatentDiffusion(DiffusersModelConfig(file, config=configs), samples=Samples(0))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(file, config=configs))
    module.configure_model()
    check_predictions(module.eval(), pipeline, 5.0, "Blurry")
    check_autoencoder(pipeline, file, configs)


def test_encoders_of_flux_in_one_file_and_a_transformer_of_another_width(tmp_path: Path) -> None:
    """diffusers converts a Flux transformer of 3,072 features only, as all published ones have."""
    torch.manual_seed(0)
    pipeline = tiny_pipelines.flux()
    configs = str(configs_of(pipeline, tmp_path))
    file = str(tmp_path / "flux1-dev-fp8.safetensors")
    encoders = {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"}
    save_file(one_file(pipeline, of_flux(pipeline.transformer.state_dict()), encoders), file)
    text = TextEncoder.load(TextEncoderConfig(file, config=configs)).encode(["a cat"])
    hidden, pooled, _ = pipeline.encode_prompt("a cat", None, device="cpu")
    torch.testing.assert_close(text.hidden, hidden)
    torch.testing.assert_close(text.pooled, pooled)
    check_autoencoder(pipeline, file, configs)
    with pytest.raises(ConfigurationError, match=r"flux1-dev-fp8.safetensors has no FluxTransformer2DModel of"):
        LatentDiffusion(DiffusersModelConfig(file, config=configs), samples=Samples(0)).configure_model()


@pytest.mark.nightly
def test_flux_in_one_file(tmp_path: Path) -> None:
    """One block of each kind of the published width."""
    torch.manual_seed(0)
    pipeline = tiny_pipelines.flux()
    sizes = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    sizes |= {"num_layers": 1, "num_single_layers": 1, "in_channels": 16, "guidance_embeds": True}
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(**sizes, joint_attention_dim=48, pooled_projection_dim=16)
    pipeline.register_modules(transformer=transformer.eval().to(torch.bfloat16).float())
    configs = str(configs_of(pipeline, tmp_path))
    shutil.rmtree(tmp_path / "whole")
    file = str(tmp_path / "flux1-dev.safetensors")
    state = {name: tensor.bfloat16() for name, tensor in of_flux(transformer.state_dict()).items()}
    encoders = {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"}
    save_file(one_file(pipeline, state, encoders), file)
    del state
    module = LatentDiffusion(DiffusersModelConfig(file, config=configs), samples=Samples(0))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(file, config=configs))
    module.configure_model()
    check_predictions(module.eval(), pipeline, 1.0, None)


def check_autoencoder(pipeline: Any, file: str, configs: str) -> None:
    codec = LatentCodec.declared(find_autoencoder(DiffusersModelConfig(file, config=configs)))
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    config = pipeline.vae.config
    theirs = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample.clamp(-1, 1)
    torch.testing.assert_close(codec.decode(latents), theirs.detach())

"""Tiny pipelines of diffusers, one a family, with random weights: the scheduler and the settings are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from lit_efficient.models.libraries.tiny_pipelines import tiny_clip as clip
from lit_efficient.models.libraries.tiny_pipelines import tiny_encoders as encoders
from lit_efficient.models.libraries.tiny_pipelines import tiny_t5 as t5
from lit_efficient.models.libraries.tiny_pipelines import tiny_vae as vae
from tests.models.libraries.test_backbones import CONDITIONED, FLUX, PIXART, SANA, SD3, SDXL

WITHOUT_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def network(fields: dict[str, Any], **changed: Any) -> Any:
    values = {**fields, **changed}
    made = getattr(diffusers, values.pop("_class_name"))(**values).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)  # layers that start at zero would hide everything
    return made


def gemma() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        max_position_embeddings=4096,
    )
    return transformers.Gemma2Model(config).eval()


Steps = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Input, timestep and guided prediction of each step of a pipeline."""


def recorded(pipeline: Any, call: Callable[[], Any], unpack: Callable[[Any], Any] = lambda latents: latents) -> Steps:
    """Return the steps that a pipeline takes during a call. ``unpack`` makes latents of what it computes with."""
    seen: Steps = []
    scheduler = pipeline.scheduler
    step = scheduler.step

    def keeping(output: Any, timestep: Any, sample: Any, *given: Any, **named: Any) -> Any:
        scaled = sample
        if hasattr(scheduler, "scale_model_input"):
            scheduler.is_scale_input_called = True
            scaled = scheduler.scale_model_input(sample, timestep)
        seen.append((unpack(scaled.clone()), timestep, unpack(output.clone())))
        return step(output, timestep, sample, *given, **named)

    scheduler.step = keeping
    pipeline.set_progress_bar_config(disable=True)
    try:
        call()
    finally:
        del scheduler.step
    assert len(seen) >= 3
    return seen


def check_steps(module: Any, predict: Callable[[Any, Any], Any], steps: Steps) -> None:
    """Compare predictions (of latents and times) with those of a pipeline."""
    for x, timestep, theirs in steps:
        with torch.no_grad():
            ours = predict(x, time_of(module, timestep))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def time_of(module: Any, timestep: torch.Tensor) -> torch.Tensor:
    """Return the time of a run for a timestep of a pipeline, [1]."""
    time = timestep.float().reshape(1) / 1000
    return time if module.process.schedule == "flow" else time + 1 / 1000


def sd15(**scheduler: Any) -> Any:
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    settings = betas | {"skip_prk_steps": True, "steps_offset": 1} | scheduler
    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        unet=network(CONDITIONED),
        scheduler=diffusers.PNDMScheduler(**settings),
        **encoders(clip(16, "CLIPTextModel")),
        **WITHOUT_CHECKER,
    )


def sd2(**scheduler: Any) -> Any:
    """Stable Diffusion 2 with v-prediction, and the zero terminal SNR of its later versions."""
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    settings |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        unet=network(CONDITIONED),
        scheduler=diffusers.DDIMScheduler(**(settings | {"steps_offset": 1} | scheduler)),
        **encoders(clip(16, "CLIPTextModel", num_hidden_layers=3, hidden_act="gelu")),
        **WITHOUT_CHECKER,
    )


def sdxl(zeros: bool = True, **scheduler: Any) -> Any:
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(scaling_factor=0.13025, force_upcast=True),
        unet=network(SDXL, cross_attention_dim=48, projection_class_embeddings_input_dim=6 * 4 + 6),
        scheduler=diffusers.EulerDiscreteScheduler(**(settings | scheduler)),
        **encoders(clip(16, "CLIPTextModel"), clip(32)),
        force_zeros_for_empty_prompt=zeros,
        add_watermarker=False,
    )


def sd3(third: bool = True, **scheduler: Any) -> Any:
    others = encoders(clip(16), clip(24), t5()) if third else encoders(clip(16), clip(24))
    return diffusers.StableDiffusion3Pipeline(
        vae=vae(scaling_factor=1.5305, shift_factor=0.0609),
        transformer=network(SD3, joint_attention_dim=48, pooled_projection_dim=12),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | scheduler)),
        **({"text_encoder_3": None, "tokenizer_3": None} | others),
    )


def flux(distilled: bool = True, **scheduler: Any) -> Any:
    settings = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
    return diffusers.FluxPipeline(
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159),
        transformer=network(FLUX, joint_attention_dim=48, pooled_projection_dim=16, guidance_embeds=distilled),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**(settings | scheduler)),
        **encoders(clip(16, "CLIPTextModel"), t5()),
    )


def pixart(**scheduler: Any) -> Any:
    settings = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear", "solver_order": 2}
    return diffusers.PixArtAlphaPipeline(
        vae=vae(),
        transformer=network(PIXART, caption_channels=48, out_channels=8),
        scheduler=diffusers.DPMSolverMultistepScheduler(**(settings | scheduler)),
        **encoders(t5()),
    )


def sana(**scheduler: Any) -> Any:
    settings = {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    autoencoder = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock"),
        decoder_block_types=("ResBlock", "ResBlock"),
        encoder_block_out_channels=(4, 4),
        decoder_block_out_channels=(4, 4),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return diffusers.SanaPipeline(
        vae=autoencoder,
        transformer=network(SANA),
        scheduler=diffusers.DPMSolverMultistepScheduler(**(settings | scheduler)),
        **encoders(gemma()),
    )


QWEN_IMAGE = {
    "_class_name": "QwenImageTransformer2DModel",
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
Z_IMAGE = {
    "_class_name": "ZImageTransformer2DModel",
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
}
QWEN = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN |= {"num_key_value_heads": 1, "vocab_size": 258, "max_position_embeddings": 4096}
CHAT = "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}</turn>{% endfor %}<answer>"


def qwen_image(**scheduler: Any) -> Any:
    settings = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192}
    settings |= {"shift_terminal": 0.02, "time_shift_type": "exponential"}
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[-0.7, 0.1, 0.2, 0.3],
        latents_std=[2.8, 1.4, 2.3, 0.9],
    )
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=QWEN | {"rope_scaling": rope}, vision_config=vision)
    return diffusers.QwenImagePipeline(
        vae=autoencoder,
        transformer=network(QWEN_IMAGE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**(settings | scheduler)),
        **encoders(transformers.Qwen2_5_VLForConditionalGeneration(config).eval()),
    )


def z_image(**scheduler: Any) -> Any:
    config = transformers.Qwen3Config(**QWEN, head_dim=8)
    pipeline = diffusers.ZImagePipeline(
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159),
        transformer=network(Z_IMAGE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | scheduler)),
        **encoders(transformers.Qwen3Model(config).eval()),
    )
    pipeline.tokenizer.chat_template = CHAT
    return pipeline


FAMILIES: dict[str, Callable[..., Any]] = {
    "sd15": sd15,
    "sd2": sd2,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "pixart": pixart,
    "sana": sana,
    "qwen_image": qwen_image,
    "z_image": z_image,
}


def written(name: str, folder: Path, **changed: Any) -> Any:
    """Write a pipeline of a family with seeded weights, and return it."""
    torch.manual_seed(0)
    pipeline = FAMILIES[name](**changed)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline

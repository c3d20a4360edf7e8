"""The pipeline of diffusers for each kind of trained latent diffusion network.

    DiTTransformer2DModel (ours is converted)   labels                  DiTPipeline
    UNet2DModel                                 nothing                 LDMPipeline
    UNet2DConditionModel                        text                    StableDiffusionPipeline
                                                text of two encoders    StableDiffusionXLPipeline
                                                with an image and mask  their Inpaint pipelines
    PixArtTransformer2DModel                    text                    PixArtAlphaPipeline
    SD3Transformer2DModel                       text of three encoders  StableDiffusion3Pipeline
    others                                      text                    the pipeline from which they came

A pipeline fixes the inputs of its network and its timesteps. A run that needs others is refused with the reason.

Source: the pipelines of diffusers, version 0.42.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.export.diffusers_parts import EVERY, Parts, Pipeline, call_of, notes_of, refuse_rescale, scheduler_of
from lit_efficient.export.diffusers_text_pipelines import of_pixart, of_sd3, of_unet
from lit_efficient.models.libraries.dit_to_diffusers import NULL_CLASS
from lit_efficient.models.libraries.folding import fold_labels, fold_timesteps


def has_maker(network: object) -> bool:
    """Return whether :func:`pipeline_for` knows the class of a network."""
    return type(network).__name__ in _MAKERS


def pipeline_for(parts: Parts) -> Pipeline:
    """Return the pipeline that samples like the run. The network of ``parts`` may be changed.

    Raises:
        ConfigurationError: If no pipeline can; the message says why.
    """
    name = type(parts.network).__name__
    size = parts.network.config.sample_size
    if not isinstance(size, int):
        allowed = "one number, because pipelines create square latents"
        raise refusal("export", f"sample_size of {name}", allowed, size)
    if parts.size is not None and parts.size[0] != parts.size[1]:
        raise ConfigurationError(
            f"export: pipelines create square latents, and {name} was trained on latents of size {parts.size}"
        )
    if 0.0 <= parts.guidance_scale < 1.0:
        raise ConfigurationError(
            f"export: pipelines treat guidance_scale={parts.guidance_scale} as 1, because they guide only above 1: "
            "sample with guidance_scale >= 1"
        )
    if parts.network.config.out_channels is None:  # models accept None, pipelines do not
        parts.network.register_to_config(out_channels=parts.network.config.in_channels)
    later = parts.process.schedule == "cosine"  # step k of our scheduler is the trained time (k + 1) / 1000
    folded = fold_timesteps(parts.network, 1.0) if later else ()
    made = _MAKERS[name](parts)
    return replace(made, notes=notes_of(parts, made.pipeline), folded=folded)


def _dit(parts: Parts) -> Pipeline:
    from diffusers import DiTPipeline

    network = parts.network
    if parts.process.schedule == "edm":
        raise ConfigurationError("export: DiTPipeline does not scale its first noise, which schedule 'edm' needs")
    if parts.size not in (None, (network.config.sample_size,) * 2):
        raise ConfigurationError(
            f"export: DiTPipeline creates latents of the network's sample_size {network.config.sample_size}, and the "
            f"network was trained on latents of size {parts.size}"
        )
    refuse_rescale(parts, "DiTPipeline")
    if network.config.num_embeds_ada_norm != NULL_CLASS:
        network = fold_labels(network, NULL_CLASS)
    scheduler = scheduler_of(parts, ("ddim", "dpmsolver++", "lcm"))
    pipeline: Any = DiTPipeline(transformer=network, vae=parts.vae, scheduler=scheduler)
    return Pipeline(pipeline, call_of(parts, "class_labels=[0]"))


def _unconditional(parts: Parts) -> Pipeline:
    from diffusers import LDMPipeline

    if parts.network.config.num_class_embeds is not None:
        raise ConfigurationError(
            "export: no pipeline of diffusers passes labels to a UNet2DModel: train without num_class_embeds for "
            "LDMPipeline, or train a DiT for DiTPipeline, which takes labels"
        )
    scheduler = scheduler_of(parts, EVERY)
    pipeline: Any = LDMPipeline(vqvae=parts.vae, unet=parts.network, scheduler=scheduler)
    return Pipeline(pipeline, f"batch_size=1, num_inference_steps={parts.steps}")


_MAKERS: dict[str, Callable[[Parts], Pipeline]] = {
    "DiTTransformer2DModel": _dit,
    "UNet2DModel": _unconditional,
    "UNet2DConditionModel": of_unet,
    "PixArtTransformer2DModel": of_pixart,
    "SD3Transformer2DModel": of_sd3,
}

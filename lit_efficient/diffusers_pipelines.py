"""Which pipeline of diffusers samples from a trained latent diffusion network, and how its parts have to be prepared.

    DiTTransformer2DModel (ours is converted)   labels          DiTPipeline
    UNet2DConditionModel                        one text        StableDiffusionPipeline
    PixArtTransformer2DModel                    one text        PixArtAlphaPipeline
    UNet2DModel                                 nothing         LDMPipeline

A pipeline fixes what it tells its network and how it walks through time; what it cannot do is refused with the reason.
Of the schedulers only those are taken that the pipeline drives rightly: ``DiTPipeline`` does not scale its first noise,
as schedulers in sigma need it, and no pipeline here takes the flow schedulers without ``scale_model_input``. Flow is
left with DPM-Solver++, which cuts timesteps to integers: its network is told a time up to 1/1000 too early.

Source: the pipelines of diffusers, version 0.42.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusers_sampling import check_steps, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.dit_to_diffusers import NULL_CLASS
from lit_efficient.models.folding import fold_labels, fold_timesteps

_PROMPTS = ("", "a photograph of a cat")


@dataclass(frozen=True)
class Parts:
    """What a trained run has to offer.

    Args:
        network: A model of diffusers, in evaluation mode.
        vae: Likewise; its latents are normalised as the network knows them.
        text_encoder: A ``TextEncoder``; None without text.
        process: Of the training.
        prediction: What the network predicts.
        sampler: Of the run.
        guidance_scale: Likewise.
        steps: Likewise.
    """

    network: Any
    vae: Any
    text_encoder: Any
    process: DiffusionProcess
    prediction: Any
    sampler: Sampler
    guidance_scale: float
    steps: int


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers, and how it is called to sample as the run did."""

    pipeline: Any
    call: str


def pipeline_for(parts: Parts) -> Pipeline:
    """The pipeline that samples what the run sampled. The network of ``parts`` may be changed.

    Raises:
        ConfigurationError: If there is none, with the reason.
    """
    name = type(parts.network).__name__
    if name not in _MAKERS:
        raise ConfigurationError(
            f"export: no pipeline of diffusers is written for {name} here, of which format safetensors holds the "
            f"weights; there is one for {', '.join(_MAKERS)}"
        )
    size = parts.network.config.sample_size
    if not isinstance(size, int):
        raise ConfigurationError(
            f"export: sample_size of {name} must be one number, as pipelines make square latents of it, not {size!r}"
        )
    if parts.network.config.out_channels is None:  # which models fill in and pipelines do not
        parts.network.register_to_config(out_channels=parts.network.config.in_channels)
    if parts.process.schedule == "cosine":  # k of our scheduler is time (k + 1) / 1000, of which it was told all
        fold_timesteps(parts.network, 1.0)
    return _MAKERS[name](parts)


def _dit(parts: Parts) -> Pipeline:
    from diffusers import DiTPipeline

    network = parts.network
    if parts.process.schedule == "edm":
        raise ConfigurationError("export: DiTPipeline does not scale its first noise, as schedule 'edm' needs it")
    if network.config.num_embeds_ada_norm != NULL_CLASS:
        network = fold_labels(network, NULL_CLASS)
    scheduler = _scheduler(parts, ("ddim", "dpmsolver++"))
    pipeline: Any = DiTPipeline(transformer=network, vae=parts.vae, scheduler=scheduler)
    return Pipeline(pipeline, _call(parts, "class_labels=[0]"))


def _stable_diffusion(parts: Parts) -> Pipeline:
    from diffusers import StableDiffusionPipeline

    _need_text(parts, "StableDiffusionPipeline")
    for field in ("num_class_embeds", "class_embed_type", "addition_embed_type"):
        value = parts.network.config[field]
        if value is not None:
            raise ConfigurationError(
                f"export: StableDiffusionPipeline gives its network one text and nothing else, and this one has "
                f"{field}={value!r}"
            )
    pipeline: Any = StableDiffusionPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoder.network,
        tokenizer=_tokenizer(parts.text_encoder),
        unet=parts.network,
        scheduler=_scheduler(parts, ("ddim", "euler", "heun", "dpmsolver++")),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )

    def encode(prompt: str) -> tuple[Any, Any]:
        hidden, _ = pipeline.encode_prompt(prompt, torch.device("cpu"), 1, False)
        return hidden, torch.ones(hidden.shape[:2], dtype=torch.bool)

    _check_text(parts, encode, "StableDiffusionPipeline")
    rescale = parts.sampler.guidance_rescale
    return Pipeline(pipeline, _call(parts, '"a caption"', f"guidance_rescale={rescale}" if rescale else ""))


def _pixart(parts: Parts) -> Pipeline:
    from diffusers import PixArtAlphaPipeline

    _need_text(parts, "PixArtAlphaPipeline")
    network, encoder = parts.network, parts.text_encoder
    told = network.use_additional_conditions
    if told != (network.config.sample_size == 128) or (
        told and 2 ** (len(parts.vae.config.block_out_channels) - 1) != 8
    ):
        raise ConfigurationError(
            "export: PixArtAlphaPipeline tells its network the size of images with sample_size 128 and otherwise not: "
            f"use_additional_conditions={told} does not fit sample_size={network.config.sample_size}, or the "
            "autoencoder's factor is not 8"
        )
    pipeline: Any = PixArtAlphaPipeline(
        tokenizer=_tokenizer(encoder),
        text_encoder=encoder.network,
        vae=parts.vae,
        transformer=network,
        scheduler=_scheduler(parts, ("ddim", "euler", "heun", "dpmsolver++")),
    )

    def encode(prompt: str) -> tuple[Any, Any]:
        hidden, mask, _, _ = pipeline.encode_prompt(prompt, False, max_sequence_length=encoder.max_length)
        return hidden, mask.bool()

    _check_text(parts, encode, "PixArtAlphaPipeline")
    fixed = f"clean_caption=False, use_resolution_binning=False, max_sequence_length={encoder.max_length}"
    return Pipeline(pipeline, _call(parts, '"a caption"', fixed))


def _unconditional(parts: Parts) -> Pipeline:
    from diffusers import LDMPipeline

    if parts.network.config.num_class_embeds is not None:
        raise ConfigurationError(
            "export: no pipeline of diffusers gives labels to a UNet2DModel: LDMPipeline, which samples latents with "
            "it, has none (num_class_embeds must be null; DiTPipeline takes labels, with a DiT)"
        )
    scheduler = _scheduler(parts, ("ddim", "euler", "heun", "dpmsolver++"))
    pipeline: Any = LDMPipeline(vqvae=parts.vae, unet=parts.network, scheduler=scheduler)
    return Pipeline(pipeline, f"batch_size=1, num_inference_steps={parts.steps}")


_MAKERS: dict[str, Callable[[Parts], Pipeline]] = {
    "DiTTransformer2DModel": _dit,
    "UNet2DConditionModel": _stable_diffusion,
    "PixArtTransformer2DModel": _pixart,
    "UNet2DModel": _unconditional,
}


def _call(parts: Parts, condition: str, further: str = "") -> str:
    settings = f"guidance_scale={parts.guidance_scale}, num_inference_steps={parts.steps}"
    return ", ".join(part for part in (condition, settings, further) if part)


def _scheduler(parts: Parts, allowed: tuple[SamplerName, ...]) -> Any:
    """The run's sampler where the pipeline can drive it, else DDIM; of flow always DPM-Solver++."""
    process, name = parts.process, parts.sampler.name
    if process.schedule == "flow":
        name = "dpmsolver++"
    elif name not in allowed:  # the built-in sampler is DDIM, as Euler's steps in sigma are
        name = "ddim"
    shift = parts.sampler.shift if process.schedule == "flow" else 1.0
    try:
        check_steps(process, Sampler(name, shift=shift), parts.steps)
        scheduler = scheduler_for(process, name, parts.prediction, shift)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"export: no scheduler of diffusers samples from this network in a pipeline: {error}"
        ) from error
    if "steps_offset" in scheduler.config:  # trailing timesteps have none, and a pipeline warns of any other number
        scheduler.register_to_config(steps_offset=1)
    return scheduler


def _need_text(parts: Parts, pipeline: str) -> None:
    if parts.text_encoder is None:
        raise ConfigurationError(
            f"export: {pipeline} encodes its prompts, and the checkpoint has no text encoder: train with text_encoder"
        )
    if "block_out_channels" not in parts.vae.config:
        raise ConfigurationError(
            f"export: {pipeline} takes the size of its images from block_out_channels, which a "
            f"{type(parts.vae).__name__} does not have"
        )


def _check_text(parts: Parts, encode: Callable[[str], tuple[Any, Any]], pipeline: str) -> None:
    """Refuse unless the pipeline tells the network of a prompt what training told it."""
    hides = "hides the padding" if pipeline.startswith("PixArt") else "and all tokens, padding too"
    for prompt in _PROMPTS:
        wanted = parts.text_encoder.encode([prompt])
        try:
            hidden, mask = encode(prompt)
        except ValueError:  # the first of its outputs is no sequence of tokens
            hidden, mask = torch.empty(0), wanted.mask
        same = hidden.shape == wanted.hidden.shape and torch.equal(mask, wanted.mask)
        if not same or not torch.allclose(hidden[mask].float(), wanted.hidden[mask].float(), rtol=1e-3, atol=1e-4):
            kind = type(parts.text_encoder.network).__name__
            raise ConfigurationError(
                f"export: {pipeline} would encode the prompt {prompt!r} in another way than training did "
                f"({parts.text_encoder.spec}): it takes the first output of a {kind} to be the last layer's, {hides}"
            )


def _tokenizer(encoder: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = encoder.tokens
    tokenizer = Tokenizer.from_str(tokens.json)
    special = {"pad_token": tokenizer.id_to_token(tokens.pad)}
    if tokens.end is not None:
        special["eos_token"] = tokenizer.id_to_token(tokens.end)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=tokens.length, padding_side=tokens.side, **special
    )

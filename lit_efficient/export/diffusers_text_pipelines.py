"""Pipelines of diffusers that encode prompts, for networks that were trained on text.

Before it is written, each pipeline encodes two prompts, one of them empty. If the embeddings differ from those of
training, the export is refused. Training hides captions by the empty caption, which is each pipeline's negative prompt.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.export.diffusers_parts import EVERY, Parts, Pipeline, call_of, refuse_rescale, scheduler_of, size_of
from lit_efficient.models.libraries.text_network import TextEmbedding

_PROMPTS = ("", "a cat")
_CAPTION = '"a caption"'


def of_unet(parts: Parts) -> Pipeline:
    """Return the pipeline of Stable Diffusion, or of SDXL if the network takes a pooled text embedding and sizes."""
    config = parts.network.config
    added = config.addition_embed_type
    for field in ("num_class_embeds", "class_embed_type"):
        if config[field] is not None:
            raise ConfigurationError(
                f"export: pipelines pass text and no labels to a UNet2DConditionModel, and this one has "
                f"{field}={config[field]!r}"
            )
    if added is None:
        return _stable_diffusion(parts)
    return _sdxl(parts)


def _stable_diffusion(parts: Parts) -> Pipeline:
    from diffusers import StableDiffusionInpaintPipeline, StableDiffusionPipeline

    kind: Any = StableDiffusionInpaintPipeline if _inpaints(parts) else StableDiffusionPipeline
    encoders = _encoders(parts, kind.__name__, 1)
    without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline: Any = kind(**encoders, **without, vae=parts.vae, unet=parts.network, scheduler=scheduler_of(parts, EVERY))

    def encode(prompt: str) -> TextEmbedding:
        hidden, _ = pipeline.encode_prompt(prompt, torch.device("cpu"), 1, False)
        return TextEmbedding(hidden, _all(hidden), None)

    _check_text(parts, pipeline, encode)
    return Pipeline(pipeline, call_of(parts, _inputs(parts), _rescale(parts)))


def _sdxl(parts: Parts) -> Pipeline:
    from diffusers import StableDiffusionXLInpaintPipeline, StableDiffusionXLPipeline

    kind: Any = StableDiffusionXLInpaintPipeline if _inpaints(parts) else StableDiffusionXLPipeline
    encoders = _encoders(parts, kind.__name__, 2)
    zeros = parts.sampler.empty_prompt == "zeros"
    settings = {"force_zeros_for_empty_prompt": zeros, "add_watermarker": False}
    pipeline: Any = kind(
        **encoders, **settings, vae=parts.vae, unet=parts.network, scheduler=scheduler_of(parts, EVERY)
    )

    def encode(prompt: str) -> TextEmbedding:
        hidden, _, pooled, _ = pipeline.encode_prompt(prompt, device="cpu", do_classifier_free_guidance=False)
        return TextEmbedding(hidden, _all(hidden), pooled)

    _check_text(parts, pipeline, encode)
    return Pipeline(pipeline, call_of(parts, _inputs(parts), _rescale(parts)))


def of_pixart(parts: Parts) -> Pipeline:
    """Return the pipeline of PixArt-alpha."""
    from diffusers import PixArtAlphaPipeline

    refuse_rescale(parts, "PixArtAlphaPipeline")
    encoders = _encoders(parts, "PixArtAlphaPipeline", 1)
    network = parts.network
    length = parts.text_encoder.max_length
    pipeline: Any = PixArtAlphaPipeline(
        **encoders, vae=parts.vae, transformer=network, scheduler=scheduler_of(parts, EVERY)
    )
    sized = network.use_additional_conditions
    if sized != (network.config.sample_size == 128):
        raise ConfigurationError(
            "export: PixArtAlphaPipeline passes the size of images to its network only if sample_size is 128: "
            f"use_additional_conditions={sized} does not fit sample_size={network.config.sample_size}"
        )

    def encode(prompt: str) -> TextEmbedding:
        hidden, mask, _, _ = pipeline.encode_prompt(prompt, False, max_sequence_length=length)
        return TextEmbedding(hidden, mask.bool(), None)

    _check_text(parts, pipeline, encode)
    fixed = f"clean_caption=False, use_resolution_binning=False, max_sequence_length={length}"
    return Pipeline(pipeline, call_of(parts, _CAPTION, size_of(parts, pipeline.vae_scale_factor), fixed))


def of_sd3(parts: Parts) -> Pipeline:
    """Return the pipeline of Stable Diffusion 3."""
    from diffusers import StableDiffusion3Pipeline

    refuse_rescale(parts, "StableDiffusion3Pipeline")
    encoder = parts.text_encoder
    without = {}
    if encoder is not None and encoder.is_padded:
        without = {"text_encoder_3": None, "tokenizer_3": None}
    encoders = _encoders(parts, "StableDiffusion3Pipeline", 2 if without else 3) | without
    scheduler = scheduler_of(parts, ("ddim", "dpmsolver++"), of_flow=("euler", "dpmsolver++"))
    pipeline: Any = StableDiffusion3Pipeline(**encoders, vae=parts.vae, transformer=parts.network, scheduler=scheduler)
    length = parts.text_encoder.spec.max_length

    def encode(prompt: str) -> TextEmbedding:
        hidden, _, pooled, _ = pipeline.encode_prompt(
            prompt, None, None, device="cpu", do_classifier_free_guidance=False, max_sequence_length=length
        )
        return TextEmbedding(hidden, _all(hidden), pooled)

    _check_text(parts, pipeline, encode)
    steps = ""
    even = type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler" and not parts.sampler.names_class
    if even:  # by default the steps of this scheduler are not evenly spaced
        steps = f"sigmas=[1 - i / {parts.steps} for i in range({parts.steps})]"
    size = size_of(parts, pipeline.vae_scale_factor)
    return Pipeline(pipeline, call_of(parts, _CAPTION, size, steps, f"max_sequence_length={length}"))


def _inpaints(parts: Parts) -> bool:
    """Return whether the network takes a mask and the latents of an image as further channels."""
    config = parts.network.config
    return bool(config.in_channels == 2 * config.out_channels + 1)


def _inputs(parts: Parts) -> str:
    """Return the arguments of a call that are inputs of the network."""
    if _inpaints(parts):
        return f"{_CAPTION}, image=picture, mask_image=mask, strength=1.0"
    return _CAPTION


def _rescale(parts: Parts) -> str:
    if _inpaints(parts):  # these pipelines do not rescale
        refuse_rescale(parts, "StableDiffusionInpaintPipeline")
    if parts.sampler.guidance_rescale:
        return f"guidance_rescale={parts.sampler.guidance_rescale}"
    return ""


def _all(hidden: Tensor) -> Tensor:
    return torch.ones(hidden.shape[:2], dtype=torch.bool)


def _encoders(parts: Parts, pipeline: str, count: int) -> dict[str, Any]:
    """Return the text encoders and tokenizers under their names in pipelines."""
    encoder = parts.text_encoder
    if encoder is None:
        raise ConfigurationError(
            f"export: {pipeline} encodes prompts, and the checkpoint has no text encoder: train with text_encoder"
        )
    if len(encoder.parts) != count:
        raise ConfigurationError(
            f"export: {pipeline} has {count} text encoders, and training had {len(encoder.parts)} ({encoder.spec})"
        )
    if "block_out_channels" not in parts.vae.config:
        raise ConfigurationError(
            f"export: {pipeline} computes the size of images from block_out_channels, which the autoencoder "
            f"{type(parts.vae).__name__} lacks"
        )
    found: dict[str, Any] = {}
    for number, part in enumerate(encoder.parts, start=1):
        suffix = "" if number == 1 else f"_{number}"
        found |= {f"text_encoder{suffix}": part.network.cpu(), f"tokenizer{suffix}": tokenizer_of(part.tokens)}
    return found


def _check_text(parts: Parts, pipeline: Any, encode: Callable[[str], TextEmbedding]) -> None:
    """Raise ConfigurationError if the pipeline's embeddings of a prompt differ from those of training."""
    for prompt in _PROMPTS:
        ours = _first_chunk(parts.text_encoder.encode([prompt]), parts.text_encoder.spec.chunks)
        try:
            agrees = _agree(encode(prompt), ours, parts.text_encoder.is_padded)
        except ValueError:  # the encoder's first output is no sequence of tokens
            agrees = False
        if not agrees:
            name = type(pipeline).__name__
            what = "hides the padding" if name.startswith("PixArt") else "lets the network see all tokens, padding too"
            kinds = ", ".join(type(part.network).__name__ for part in parts.text_encoder.parts)
            raise ConfigurationError(
                f"export: {name} encodes the prompt {prompt!r} differently from training with {kinds} "
                f"({parts.text_encoder.spec}): the pipeline {what}, and it chooses the encoder's layers by itself"
            )


def _first_chunk(embedding: TextEmbedding, chunks: int) -> TextEmbedding:
    """Return the embedding of the first chunk: pipelines encode one, and take longer ones as ``prompt_embeds``."""
    length = embedding.hidden.shape[1] // chunks
    return TextEmbedding(embedding.hidden[:, :length], embedding.mask[:, :length], embedding.pooled)


def _agree(theirs: TextEmbedding, ours: TextEmbedding, padded: bool) -> bool:
    missing = theirs.hidden.shape[-1] - ours.hidden.shape[-1]
    if padded and missing > 0:
        ours = ours._replace(hidden=F.pad(ours.hidden, (0, missing)))
    if not torch.equal(theirs.mask, ours.mask) or not _close(theirs.hidden[ours.mask], ours.hidden[ours.mask]):
        return False
    return theirs.pooled is None or (ours.pooled is not None and _close(theirs.pooled, ours.pooled))


def _close(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours.float(), rtol=1e-3, atol=1e-4)


def tokenizer_of(tokens: Any) -> Any:
    """Return the tokenizer of transformers for the tokens of captions."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(tokens.json)
    special = {"pad_token": tokenizer.id_to_token(tokens.pad)}
    if tokens.end is not None:
        special["eos_token"] = tokenizer.id_to_token(tokens.end)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=tokens.length, padding_side=tokens.side, **special
    )

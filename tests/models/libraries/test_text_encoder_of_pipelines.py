"""Text encoders read from a pipeline's folder give what the pipeline itself gives its network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)

from lit_efficient.models.libraries.text_encoder import CaptionReading, TextEncoder, TextEncoderConfig
from lit_efficient.models.libraries.tiny_pipelines import tiny_clip as clip
from lit_efficient.models.libraries.tiny_pipelines import tiny_encoders
from lit_efficient.models.libraries.tiny_pipelines import tiny_t5 as t5

CAPTIONS = ["a cat", "dogs in a row", ""]


def saved(folder: Path, *encoders: Any) -> dict[str, Any]:
    """The components of a pipeline, written as it writes them."""
    parts = tiny_encoders(*encoders)
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return parts


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "skip"), [("CLIPTextModel", None), ("CLIPTextModelWithProjection", 1)])
@torch.no_grad()
def test_stable_diffusion_with_and_without_clip_skip(tmp_path: Path, kind: str, skip: int | None) -> None:
    nothing = {"vae": None, "unet": None, "safety_checker": None, "feature_extractor": None}
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = saved(tmp_path, clip(16, kind))
    pipeline = StableDiffusionPipeline(**parts, **nothing, scheduler=scheduler, requires_safety_checker=False)
    theirs = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False, clip_skip=skip)[0]
    ours = encoder(tmp_path, layer=-1 - (skip or 0), final_norm=bool(skip)).encode(CAPTIONS)
    torch.testing.assert_close(ours.hidden, theirs)
    assert ours.mask.all()


def encoder(folder: Path, **arguments: Any) -> TextEncoder:
    folders = {"subfolder": "text_encoder", "captions": CaptionReading(subfolder="tokenizer")}
    return TextEncoder.load(TextEncoderConfig(str(folder), **folders, **arguments))


@torch.no_grad()
def test_pixart(tmp_path: Path) -> None:
    pipeline = PixArtAlphaPipeline(**saved(tmp_path, t5()), vae=None, transformer=None, scheduler=None)
    theirs, mask, _, _ = pipeline.encode_prompt(
        CAPTIONS, do_classifier_free_guidance=False, device="cpu", clean_caption=False, max_sequence_length=20
    )
    ours = encoder(tmp_path, max_length=20).encode(CAPTIONS)
    assert torch.equal(ours.mask, mask.bool())
    torch.testing.assert_close(ours.hidden[ours.mask], theirs[ours.mask])


@torch.no_grad()
def test_sdxl(tmp_path: Path) -> None:
    parts = saved(tmp_path, clip(16, "CLIPTextModel"), clip(32))
    pipeline = StableDiffusionXLPipeline(**parts, vae=None, unet=None, scheduler=None, add_watermarker=False)
    hidden, _, pooled, _ = pipeline.encode_prompt(CAPTIONS, device="cpu", do_classifier_free_guidance=False)
    check(TextEncoderConfig(str(tmp_path), pipeline="sdxl"), hidden, pooled)


@torch.no_grad()
def test_sd3(tmp_path: Path) -> None:
    parts = saved(tmp_path, clip(16), clip(24), t5())
    pipeline = StableDiffusion3Pipeline(**parts, vae=None, transformer=None, scheduler=None)
    hidden, _, pooled, _ = pipeline.encode_prompt(
        CAPTIONS, CAPTIONS, CAPTIONS, device="cpu", do_classifier_free_guidance=False, max_sequence_length=20
    )
    assert hidden.shape == (3, 97, 48)
    check(TextEncoderConfig(str(tmp_path), pipeline="sd3", max_length=20), hidden, pooled)


@torch.no_grad()
def test_flux(tmp_path: Path) -> None:
    parts = saved(tmp_path, clip(16, "CLIPTextModel"), t5())
    pipeline = FluxPipeline(**parts, vae=None, transformer=None, scheduler=None)
    hidden, pooled, _ = pipeline.encode_prompt(CAPTIONS, CAPTIONS, device="cpu", max_sequence_length=20)
    check(TextEncoderConfig(str(tmp_path), pipeline="flux", max_length=20), hidden, pooled)


def check(spec: TextEncoderConfig, hidden: torch.Tensor, pooled: torch.Tensor) -> None:
    """Embeddings, widths and, through a state, the whole encoder."""
    loaded = TextEncoder.load(spec)
    for ours in (loaded, TextEncoder.from_state_dict(loaded.state_dict())):
        found = ours.encode(CAPTIONS)
        torch.testing.assert_close(found.hidden, hidden)
        torch.testing.assert_close(found.pooled, pooled)
        assert found.mask.all()
        assert not ours.hides_padding
        assert (ours.width, ours.pooled_width, ours.max_length) == (hidden.shape[2], pooled.shape[1], hidden.shape[1])

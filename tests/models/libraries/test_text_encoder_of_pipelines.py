"""Text encoders read from a pipeline's folder give what the pipeline itself gives its network."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import (
    DDIMScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.caption_tokens import load_tokenizer
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


# As CLIP's own tokenizer: a begin and an end token around each chunk.
BEGIN = "<begin>"


def chunked(folder: Path, *networks: Any) -> None:
    """Encoders and a tokenizer with a begin token, whose chunks hold six of a caption's tokens."""
    bytewise = Tokenizer.from_str(load_tokenizer("bytes", "", None, 8, "right").json)
    bytewise.add_special_tokens([BEGIN])
    bytewise.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A <end>", special_tokens=[(BEGIN, bytewise.token_to_id(BEGIN)), ("<end>", 1)]
    )
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", eos_token="<end>", bos_token=BEGIN, model_max_length=8
    )
    for number, network in enumerate(networks, start=1):
        suffix = "" if number == 1 else f"_{number}"
        network.save_pretrained(folder / f"text_encoder{suffix}")
        found.save_pretrained(folder / f"tokenizer{suffix}")


def by_hand(network: Any, caption: str, count: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of ``count`` chunks, and what CLIP pools of the first. A chunk is begin, up to six bytes, end, padding."""
    body = [byte + 2 for byte in caption.encode()]
    states = []
    pooled = []
    for number in range(count):
        part = body[6 * number : 6 * number + 6]
        ids = [258, *part, 1]
        ids += [0] * (8 - len(ids))
        output = network(torch.tensor([ids]), output_hidden_states=True)
        states.append(output.last_hidden_state if layer == -1 else output.hidden_states[layer])
        pooled.append(output.get("text_embeds", output.get("pooler_output")))
    return torch.cat(states, dim=1), pooled[0]


LONG = ["a cat", "dogs in a row of fifteen!", "", "exactly twelve"[:12]]


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.no_grad()
def test_long_captions_are_encoded_in_chunks(tmp_path: Path, count: int) -> None:
    large = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 258, "eos_token_id": 1, "num_attention_heads": 2}
    large |= {"intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 8, "projection_dim": 6}
    small = transformers.CLIPTextModel(transformers.CLIPTextConfig(hidden_size=16, **large)).eval()
    wide = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(hidden_size=32, **large)).eval()
    captions = [caption for caption in LONG if len(caption) <= 6 * count]
    chunked(tmp_path / "sd", small)
    found = TextEncoder.load(TextEncoderConfig(str(tmp_path / "sd"), pipeline="sd", chunks=count)).encode(captions)
    for row, caption in enumerate(captions):
        torch.testing.assert_close(found.hidden[row], by_hand(small, caption, count, -1)[0][0])
    chunked(tmp_path / "sdxl", small, wide)
    xl = TextEncoder.load(TextEncoderConfig(str(tmp_path / "sdxl"), pipeline="sdxl", chunks=count))
    for ours in (xl, TextEncoder.from_state_dict(xl.state_dict())):
        found = ours.encode(captions)
        for row, caption in enumerate(captions):
            parts = [by_hand(network, caption, count, -2) for network in (small, wide)]
            torch.testing.assert_close(found.hidden[row], torch.cat([part[0][0] for part in parts], dim=-1))
            torch.testing.assert_close(found.pooled[row], parts[1][1][0])
    assert xl.max_length == xl.encode([""], negative=True).hidden.shape[1] == 8 * count
    other = TextEncoder.load(TextEncoderConfig(str(tmp_path / "sdxl"), pipeline="sdxl", chunks=count + 1))
    assert other.fingerprint() != xl.fingerprint()


def test_chunks_beyond_the_number_are_said_and_other_encoders_refuse_them(tmp_path: Path) -> None:
    small = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=259,
            bos_token_id=258,
            eos_token_id=1,
            max_position_embeddings=8,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    chunked(tmp_path, small)
    ours = TextEncoder.load(TextEncoderConfig(str(tmp_path), pipeline="sd", chunks=2))
    with pytest.warns(UserWarning, match="more than 2 chunks of max_length=8 tokens and is truncated"):
        found = ours.encode(["abcdefabcdefX"])
    assert torch.equal(found.hidden, ours.encode(["abcdefabcdef"]).hidden)
    with pytest.raises(ConfigurationError, match="chunks must be 1 for T5EncoderModel, which is no CLIP, got 2"):
        TextEncoder.load(TextEncoderConfig(config_fields={"model_type": "t5", "d_model": 16}, chunks=2, max_length=8))
    with pytest.raises(
        ConfigurationError, match="pipeline must be null with chunks, which a pipeline fixes, got 'flux'"
    ):
        TextEncoderConfig("folder", pipeline="flux", chunks=2)

"""The configs for pretrained weights, with small models of the same kinds in the places of the hub's."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import tiny_clip as clip
from lit_efficient.models.libraries.tiny_pipelines import tiny_tokenizer as tokenizer

FOLDER = Path(__file__).parents[2] / "benchmarks" / "pretrained"
SHORT = ["--trainer.max_steps", "1", "--trainer.precision", "32-true", "--trainer.limit_val_batches", "1"]


def stable_diffusion(folder: Path) -> None:
    """A pipeline's folder as Stable Diffusion 1.5's is, small."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    blocks = {"down": ("CrossAttnDownBlock2D", "DownBlock2D"), "up": ("UpBlock2D", "CrossAttnUpBlock2D")}
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=blocks["down"],
        up_block_types=blocks["up"],
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    vae = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=2,
    )
    parts = {
        "text_encoder": clip(16, "CLIPTextModel"),
        "tokenizer": tokenizer(),
        "scheduler": DDIMScheduler(1000, 0.00085, 0.012, "scaled_linear", steps_offset=1, clip_sample=False),
    }
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    StableDiffusionPipeline(vae=vae, unet=unet, **parts, **none).save_pretrained(folder)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:A caption has more than")  # of tokens that are bytes
def test_the_lora_of_stable_diffusion_is_cached_trained_previewed_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import AutoencoderTiny, DiffusionPipeline

    monkeypatch.chdir(tmp_path)
    images = Path("runs/pretrained/images")
    images.mkdir(parents=True)
    for number in range(10):
        Image.new("RGB", (80, 64), (25 * number, 80, 120)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"number {number}")
    stable_diffusion(tmp_path / "model")
    tiny = {"num_encoder_blocks": (1,) * 4, "num_decoder_blocks": (1,) * 4}
    channels = {"encoder_block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4}
    AutoencoderTiny(**channels, **tiny).save_pretrained(tmp_path / "taesd")
    text = (FOLDER / "sd15_lora.yaml").read_text("utf-8")
    name = yaml.safe_load(text)["model"]["init_args"]["backbone"]["init_args"]["name_or_path"]
    Path("here.yaml").write_text(text.replace(name, "model").replace("resolution: 512", "resolution: 64"))
    assert main(["cache-latents", "-c", "here.yaml", "--batch_size", "2"]) == 0
    short = [*SHORT, "--trainer.check_val_every_n_epoch", "1", "--trainer.limit_train_batches", "1"]
    assert main(["fit", "-c", "here.yaml", *short, "--model.samples.preview.name_or_path", "taesd"]) == 0
    run = Path("runs/pretrained/sd15/latest")
    assert list((run / "samples").glob("*.png"))
    assert main(["export", str(run / "last.ckpt"), "--format", "diffusers", "--output", "made"]) == 0
    assert type(DiffusionPipeline.from_pretrained("made")).__name__ == "StableDiffusionPipeline"

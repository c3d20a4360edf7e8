"""A run that names a pipeline's folder: its latents, captions and export are the pipeline's, and `check` shows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import save_file

from lit_efficient import (
    ConfigurationError,
    DiffusersModelConfig,
    EncodedData,
    ImageData,
    LatentData,
    LatentDiffusion,
    Samples,
)
from lit_efficient.__main__ import main
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.export.pipelines import export_pipeline
from lit_efficient.losses.timesteps import TimestepSampling
from lit_efficient.models.libraries.text_encoder import TextEncoderConfig
from tests import tiny_pipelines
from tests.support import trainer
from tests.tasks.test_pipeline_predictions import check_predictions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def pictures(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 80, 120)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"Number {number}")
    return folder


def data_of(folder: Path, images: Path, text: TextEncoderConfig | None = None, **arguments: Any) -> LatentData:
    """Data whose config names the pipeline's folder alone."""
    return LatentData(
        ImageData(str(images), view=ImageView(resolution=64), batch_size=2),
        DiffusersModelConfig(str(folder)),
        text or TextEncoderConfig(str(folder)),
        cached=False,
        **arguments,
    )


def fitted(module: LatentDiffusion, data: LatentData, folder: Path) -> Any:
    runner = trainer(default_root_dir=folder, max_steps=1, max_epochs=-1, limit_val_batches=0)
    runner.fit(module, data)
    return runner


def test_latents_and_captions_are_the_pipelines_and_the_export_guides_as_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "sdxl"
    pipeline = tiny_pipelines.written("sdxl", folder)
    images = pictures(tmp_path / "images")
    module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0), guidance_scale=5.0)
    data = data_of(folder, images)
    runner = fitted(module, data, tmp_path)
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mean, _ = data.codec.encode(picture)
    theirs = pipeline.vae.encode(picture).latent_dist.mean * pipeline.vae.config.scaling_factor
    torch.testing.assert_close(mean, theirs)
    runner.save_checkpoint(tmp_path / "run.ckpt")
    made = export_pipeline(tmp_path / "run.ckpt", tmp_path / "made", check=False)
    exported = DiffusionPipeline.from_pretrained(made)
    assert exported.config.force_zeros_for_empty_prompt
    exported.set_progress_bar_config(disable=True)
    check_predictions(module.eval(), exported, 5.0, None)


def test_a_stable_diffusion_3_without_t5_is_trained_and_exported_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    tiny_pipelines.written("sd3", folder, third=False)
    module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0), guidance_scale=5.0)
    runner = fitted(module, data_of(folder, pictures(tmp_path / "images")), tmp_path)
    runner.save_checkpoint(tmp_path / "run.ckpt")
    made = export_pipeline(tmp_path / "run.ckpt", tmp_path / "made")
    without = ", text_encoder_3=None, tokenizer_3=None)"
    assert f'DiffusionPipeline.from_pretrained("FOLDER"{without}' in (made / "README.md").read_text()
    exported = DiffusionPipeline.from_pretrained(made, text_encoder_3=None, tokenizer_3=None)
    assert exported.text_encoder_3 is None
    exported.set_progress_bar_config(disable=True)
    check_predictions(module.eval(), exported, 5.0, "Blurry")


def test_data_of_another_scaling_or_reading_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sdxl"
    tiny_pipelines.written("sdxl", folder)
    images = pictures(tmp_path / "images")
    clip = TextEncoderConfig(str(folder), pipeline="sd")
    for changed, setting, message in (
        (
            {"statistics": "measured"},
            "vae_scaling",
            r"scaling of the data's latents must be declared, mean 0, std 7\.677",
        ),
        (
            {"text": clip},
            "text_encoder",
            r"data's text_encoder must be pipeline: sdxl \(layer -2; layer -2\), .*got 'la",
        ),
    ):
        module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0))
        with pytest.raises(ConfigurationError, match=message) as caught:
            fitted(module, data_of(folder, images, **changed), tmp_path)
        assert f"override: [{setting}]" in str(caught.value)
    module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0), override=["vae_scaling"])
    data = data_of(folder, images)
    fitted(module, data, tmp_path)
    assert data.codec.std.max() < 7  # measured: the pipeline's scaling is not asked for


def test_check_shows_where_each_setting_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "flux"
    tiny_pipelines.written("flux", folder)
    named = {"name_or_path": str(folder)}
    spec = {"class_path": "lit_efficient.DiffusersModelConfig", "init_args": named}
    sampling = {"class_path": TimestepSampling.__name__, "init_args": {"shift": 2.0}}
    images = {"train": str(pictures(tmp_path / "images")), "view": {"resolution": 64}, "batch_size": 2}
    model = {"backbone": spec, "override": ["timestep_shift"], "timestep_sampling": sampling["init_args"]}
    data = {"images": {"class_path": "ImageData", "init_args": images}, "autoencoder": spec, "text_encoder": named}
    config = {
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1},
        "model": {"class_path": "LatentDiffusion", "init_args": model},
        "data": {"class_path": "LatentData", "init_args": data | {"cached": False}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", "-c", str(tmp_path / "c.yaml"), "--with_data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"settings of FluxPipeline in {folder}:")
    table = [line.strip().split("  ") for line in lines[start + 1 : start + 9]]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in table}
    shift = "ResolutionShift(base_tokens=256, max_tokens=4096, base_shift=0.5, max_shift=1.15, kind='exponential')"
    assert rows["setting"] == ["from the folder", "from the config", "in use"]
    assert rows["prediction_type"] == ["flow", "-", "flow"]
    assert rows["sampler.shift"] == [shift, "-", shift]
    assert rows["timestep_sampling.shift"] == [shift, "2.0", "2.0"]
    assert rows["vae_scaling"] == ["mean 0.1159, std 2.7693", "-", "mean 0.1159, std 2.7693"]
    assert rows["text_encoder"] == ["layer -1; layer -1", "-", "layer -1; layer -1"]


def test_a_name_on_a_hub_is_read_from_its_cache_and_an_incomplete_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name, complete in (("own/whole", True), ("own/part", False)):
        place = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / ("0" * 40)
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        tiny_pipelines.written("sd2", snapshot)
        if not complete:
            shutil.rmtree(snapshot / "scheduler")
    module = LatentDiffusion(DiffusersModelConfig("own/whole"), samples=Samples(0))
    assert (module.prediction, module.process.zero_terminal_snr) == ("v", True)
    with pytest.raises(ConfigurationError, match=r"own/part is in the local cache without scheduler/scheduler_config"):
        LatentDiffusion(DiffusersModelConfig("own/part"))
    assert (
        LatentDiffusion(DiffusersModelConfig("own/absent")).prediction == "flow"
    )  # building it says that it is absent


def test_encoded_latents_are_scaled_as_the_pipeline_declares(tmp_path: Path) -> None:
    tiny_pipelines.written("sdxl", tmp_path / "sdxl")
    (tmp_path / "rows").mkdir()
    save_file(
        {"latents": torch.randn(8, 4, 8, 8) * 3, "labels": torch.zeros(8).long()}, tmp_path / "rows/a.safetensors"
    )
    data = EncodedData(str(tmp_path / "rows"), held_out=2, batch_size=2)
    module = LatentDiffusion(
        DiffusersModelConfig(str(tmp_path / "sdxl")), samples=Samples(0), label_dropout=0.0, guidance_scale=1.0
    )
    data.trainer = SimpleNamespace(lightning_module=module)  # type: ignore[assignment]
    data.setup("fit")
    assert data.latent_scaling is not None
    assert data.latent_scaling[1] == pytest.approx([1 / 0.13025] * 4)
    measured = EncodedData(str(tmp_path / "rows"), held_out=2, batch_size=2, statistics="measured")
    with pytest.raises(ConfigurationError, match=r"scaling of the data's latents must be declared, mean 0, std 7\.67"):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(module, measured)

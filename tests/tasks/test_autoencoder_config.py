"""Autoencoders on the command line: the config runs, and every kind of specification can be written in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient import LatentCodec, Perceptual, build_autoencoder
from lit_efficient.__main__ import main
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.autoencoder import AutoencoderConfig
from tests.models.libraries.diffusers_autoencoders import TINY
from tests.support_cli import Parts

CONFIG = Path(__file__).parents[2] / "configs" / "tasks" / "autoencoder.yaml"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts(tmp_path: Path, model: dict[str, Any]) -> Any:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"model": model, "data": {"class_path": "DigitImages"}}))
    return Parts(args=["fit", "-c", "x.yaml", "--trainer.logger=false"]).model


@pytest.mark.turns(4, family="learns")
def test_the_config_runs_shows_pictures_and_leaves_an_autoencoder() -> None:
    few = ["--trainer.max_steps=1", "--trainer.limit_train_batches=1", "--trainer.check_val_every_n_epoch=1"]
    few += ["--trainer.limit_val_batches=1", "--trainer.logger=false", "--data.init_args.image_size=8"]
    few += ["--trainer.enable_model_summary=false", "--data.init_args.batch_size=4"]
    assert main(["fit", "-c", str(CONFIG), *few]) == 0
    assert f"python -m lit_efficient fit -c {CONFIG.stem}" in CONFIG.read_text("utf-8")
    (picture,) = Path("runs/autoencoder/latest/samples").iterdir()
    assert picture.name == "step_0000001.png"
    checkpoint = Path("runs/autoencoder/latest/last.ckpt")
    codec = LatentCodec.declared(build_autoencoder(str(checkpoint)))
    assert (codec.image_channels, codec.latent_channels, codec.factor) == (1, 4, 4)
    assert codec.decode(codec.encode(torch.zeros(1, 1, 16, 8))[0]).shape == (1, 1, 16, 8)


def test_ours_is_written_as_before(tmp_path: Path) -> None:
    model = parts(tmp_path, {"class_path": "Autoencoding", "init_args": {"autoencoder": {"width": 8}}})
    assert model.config == AutoencoderConfig(width=8)
    assert model.perceptual is None


def test_a_model_of_diffusers_and_a_network_by_class_path(tmp_path: Path) -> None:
    network = {"class_path": "lit_efficient.models.judges.conv_features.DigitFeatures"}
    perceptual = {"network": network, "layers": ["body.0", "body.2"], "weight": 0.5}
    arguments = {"autoencoder": {"config_fields": TINY}, "reconstruction": "smooth", "perceptual": perceptual}
    model = parts(tmp_path, {"class_path": "Autoencoding", "init_args": arguments})
    assert model.config == DiffusersModelConfig(config_fields=TINY)
    assert type(model.perceptual.network).__name__ == "DigitFeatures"
    named = {**arguments, "perceptual": {"network": "data.judge", "layers": ["body.0"]}}
    model = parts(tmp_path, {"class_path": "Autoencoding", "init_args": named})
    assert model.perceptual == Perceptual("data.judge", ["body.0"])


def test_a_preview_is_named_in_the_diffusion_task(tmp_path: Path) -> None:
    preview = {"name_or_path": "madebyollin/taesd"}
    model = parts(tmp_path, {"class_path": "LatentDiffusion", "init_args": {"samples": {"preview": preview}}})
    assert model.samples.preview == DiffusersModelConfig("madebyollin/taesd")

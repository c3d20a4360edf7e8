"""Networks are exported into a copy of the pipeline from which they came, which then predicts as the run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from lit_efficient import DiffusersModelConfig, LatentDiffusion, LoRA, Samples
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.latent_conditions import TextTraining
from tests import tiny_pipelines
from tests.support_cli import export
from tests.tasks.test_pipeline_predictions import UNGUIDED, check_predictions

FAMILIES = ("flux", "sana", "qwen_image", "z_image")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def trained(folder: Path, **arguments: Any) -> LatentDiffusion:
    """A run on a pipeline, all of whose weights have changed."""
    module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0), **arguments)
    spec = DiffusersModelConfig(str(folder), subfolder="vae")
    assert module.latent_scaling is not None
    module.codec = LatentCodec(find_autoencoder(spec), *(torch.tensor(values) for values in module.latent_scaling))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
    module.latent_size = (32 // module.codec.factor,) * 2 if module.codec.factor < 8 else (8, 8)
    module.configure_model()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module.eval()


def written(module: LatentDiffusion, path: Path) -> Path:
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)
    return path


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_predicts_as_the_run(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_pipelines.written(family, tmp_path / "base")
    module = trained(tmp_path / "base")
    path = written(module, tmp_path / "run.ckpt")
    folder = tmp_path / "exported"
    assert export([str(path), "--format", "diffusers", "--output", str(folder)]) == 0
    assert "diffusers loads the" in capsys.readouterr().err
    theirs: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    assert type(theirs) is type(base)
    for name, tensor in base.transformer.state_dict().items():
        assert not torch.equal(theirs.transformer.state_dict()[name], tensor)
    check_predictions(module, theirs, 5.0, "Blurry" if family in UNGUIDED else None)
    for file in (tmp_path / "base").rglob("*"):
        if file.is_file() and file.parent.name not in ("transformer", "base"):
            assert (folder / file.relative_to(tmp_path / "base")).read_bytes() == file.read_bytes()
    call = next(line for line in (folder / "README.md").read_text().splitlines() if line.startswith("images = "))
    made: dict[str, Any] = {"pipeline": theirs}
    exec(call.replace("num_inference_steps=20", "num_inference_steps=2"), made)
    assert made["images"][0].size == ((32, 32) if family == "sana" else (64, 64))


def test_text_encoders_that_trained_are_part_of_the_copy(tmp_path: Path) -> None:
    tiny_pipelines.written("flux", tmp_path / "base")
    module = trained(tmp_path / "base", text_training=TextTraining(encoders=["text_encoder"]))
    path = written(module, tmp_path / "run.ckpt")
    assert export([str(path), "--format", "diffusers", "--output", str(tmp_path / "out"), "--no-check"]) == 0
    theirs: Any = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    theirs.set_progress_bar_config(disable=True)
    check_predictions(module, theirs, 1.0, None)
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["text_encoder"][1] == "CLIPTextModel"


@pytest.mark.turns(6, family="slow")
def test_merged_adapters_and_adapters_alone(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    from tests.export.test_pipelines import Latents
    from tests.support import QUIET

    base = tiny_pipelines.written("flux", tmp_path / "base")
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path / "base")), samples=Samples(0), learning_rate=0.02)
    codec = LatentCodec(
        find_autoencoder(DiffusersModelConfig(str(tmp_path / "base"), subfolder="vae")),
        *(torch.tensor(values) for values in module.latent_scaling or ()),
    )
    data = Latents(codec, TextEncoder.load(TextEncoderConfig(str(tmp_path / "base"))))
    data.latent_shape = (4, 8, 8)
    trainer = Trainer(callbacks=[LoRA(rank=4, targets=["to_q", "to_v"])], **QUIET, max_steps=4)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    module.eval()
    for name, options in {"merged": [], "adapters": ["--lora", "diffusers"]}.items():
        folder = tmp_path / name
        assert export([str(tmp_path / "run.ckpt"), "--format", "diffusers", "--output", str(folder), *options]) == 0
        theirs: Any = diffusers.FluxPipeline.from_pretrained(folder)
        theirs.set_progress_bar_config(disable=True)
        if options:
            theirs.load_lora_weights(folder)
        check_predictions(module, theirs, 1.0, None)
    assert isinstance(base.transformer, nn.Module)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"prediction": "x0", "override": ["prediction_type"]}, r"override: \[prediction_type\], so that Flux"),
        ({}, "only in a variant such as fp16"),
    ],
    ids=["override", "variant"],
)
def test_what_no_copy_can_hold(
    arguments: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_pipelines.written("flux", tmp_path / "base")
    path = written(trained(tmp_path / "base", **arguments), tmp_path / "run.ckpt")
    if not arguments:
        vae = tmp_path / "base" / "vae"
        (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    assert export([str(path), "--format", "diffusers", "--output", str(tmp_path / "out")]) == 2
    import re

    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()

"""From 15 photographs with captions to a LoRA in diffusers' and in ComfyUI's layout, by the recipes as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import LoRA
from lit_efficient.__main__ import main
from lit_efficient.application import apply
from lit_efficient.data.images.tiny_photos import local_images
from lit_efficient.models.libraries.tiny_pipelines import local_name
from tests.mechanisms.adapters.test_lora_files import Trains, predicted

FEW = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.logger=false"]
FEW += ["--model.init_args.sampling_steps=2", "--model.init_args.learning_rate=0.01"]


@pytest.mark.turns(2, family="shipped configs")
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_photographs_become_a_lora_in_both_layouts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(local_images("tiny:photos", None), "photographs", ignore=shutil.ignore_patterns("SHA*"))
    assert len(list(Path("photographs").glob("*.jpg"))) == len(list(Path("photographs").glob("*.txt"))) == 15
    config = f"diffusion/lora_{family}"
    assert main(["copy", config, "mine.yaml"]) == 0
    assert main(["fit", "-c", "mine.yaml", "--data.init_args.images.init_args.train=photographs", *FEW]) == 0
    checkpoint = f"runs/diffusion/lora_{family}/latest/last.ckpt"
    assert main(["export", checkpoint, "--format", "peft", "--output", "lora"]) == 0

    saved = torch.load(checkpoint, weights_only=True)
    ours = Trains(transformer(family))
    base = predicted(ours.network)
    apply(ours, [LoRA(**saved["lit_efficient"]["transforms"][0]["arguments"])])
    ours.load_state_dict(saved["state_dict"])
    expected = predicted(ours.network)
    assert (expected - base).abs().max() > 1e-3

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}")))
    pipeline.load_lora_weights("lora")
    factors = {name for name, _ in pipeline.transformer.named_parameters() if ".lora_" in name}
    trained = [name for name in saved["state_dict"] if ".lora_" in name]
    assert len(factors) == len(load_file("lora/pytorch_lora_weights.safetensors")) == len(trained) > 0
    torch.testing.assert_close(predicted(pipeline.transformer), expected, rtol=1e-5, atol=1e-5)

    again = Trains(transformer(family))
    apply(again, [LoRA(start_from="lora/kohya.safetensors")])
    torch.testing.assert_close(predicted(again.network), expected, rtol=1e-5, atol=1e-5)
    wrong = "--model.init_args.backbone.init_args.name_or_path=tiny:sdxl"
    continued = Path("mine.yaml").read_text().replace("rank: 16\n", "start_from: lora/kohya.safetensors\n")
    start, _, end = continued.partition("        alpha: 16\n")
    Path("continued.yaml").write_text(start + end.partition("\n")[2])
    assert main(["fit", "-c", "continued.yaml", *FEW, "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]) == 0
    caches = set(Path("cache/latents").iterdir())
    capsys.readouterr()
    assert main(["fit", "-c", "continued.yaml", *FEW, wrong]) == 2
    assert "does not fit UNet2DConditionModel" in capsys.readouterr().err
    assert set(Path("cache/latents").iterdir()) == caches  # refused before anything is encoded


def transformer(family: str) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}"))).transformer

"""Recipes that distil a pipeline, from photographs to a pipeline of diffusers that samples with the LCM scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import local_name
from tests.configs.following import CONFIGS, small

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fitted(name: str) -> dict[str, Any]:
    config = small(CONFIGS / "diffusion" / f"{name}.yaml", model={"learning_rate": 0.05})
    assert main(["fit", "-c", config]) == 0
    return torch.load(f"runs/diffusion/{name}/latest/last.ckpt", weights_only=True)


def loaded(folder: str | Path) -> Any:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    steps = {"num_inference_steps": 2, "guidance_scale": 1.0, "height": 64, "width": 64}
    return pipeline("an orange dahlia", **steps, output_type="pt", generator=generator).images


@pytest.mark.turns(2, family="distilled recipes")
@pytest.mark.parametrize("name", ["lcm_lora_sdxl", "dmd2_sdxl"])
def test_a_pipeline_becomes_one_of_few_steps(name: str) -> None:
    from diffusers import LCMScheduler

    saved = fitted(name)
    checkpoint = f"runs/diffusion/{name}/latest/last.ckpt"
    base = loaded(local_name("tiny:sdxl"))
    base.scheduler = LCMScheduler.from_config(base.scheduler.config)
    before = image(base)
    if name == "lcm_lora_sdxl":
        assert main(["export", checkpoint, "--format", "peft", "--output", "out"]) == 0
        base.load_lora_weights("out")
        trained = [key for key in saved["state_dict"] if ".lora_" in key]
        assert len([key for key, _ in base.unet.named_parameters() if ".lora_" in key]) == len(trained) > 0
        assert not torch.equal(image(base), before)
        return
    assert main(["export", checkpoint, "--format", "diffusers", "--output", "out"]) == 0
    pipeline = loaded("out")
    assert type(pipeline.scheduler) is LCMScheduler
    names = dict(pipeline.unet.named_parameters())
    assert all(torch.equal(tensor, saved["state_dict"][f"network.{key}"]) for key, tensor in names.items())
    assert not any(key.startswith("fake.") for key in saved["state_dict"])
    assert not torch.equal(image(pipeline), before)

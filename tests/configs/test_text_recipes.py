"""Recipes that train on captions, from photographs to a pipeline of diffusers that loads what was exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import local_name
from tests.configs.following import CONFIGS, small

pytestmark = pytest.mark.filterwarnings("ignore")
GIVEN = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": "cpu"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.turns(2, family="text recipes")
@pytest.mark.parametrize(
    ("name", "family"), [("textual_inversion", "sd15"), ("lora_sd15", "sd15"), ("lora_sdxl", "sdxl")]
)
def test_photographs_end_in_a_pipeline(name: str, family: str) -> None:
    import diffusers

    config = small(CONFIGS / "diffusion" / f"{name}.yaml", model={"learning_rate": 0.05, "sampling_steps": 2})
    assert main(["fit", "-c", config]) == 0
    checkpoint = f"runs/diffusion/{name}/latest/last.ckpt"
    assert main(["export", checkpoint, "--format", "peft", "--output", "out"]) == 0
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}")))
    prompt = "a <thing> on a table"
    before = pipeline.encode_prompt(prompt, **GIVEN)[0]
    if name == "textual_inversion":
        pipeline.load_textual_inversion("out")
        assert len(pipeline.tokenizer("<thing>").input_ids) - len(pipeline.tokenizer("").input_ids) == 1
    else:
        pipeline.load_lora_weights("out")
    after = pipeline.encode_prompt(prompt, **GIVEN)[0]
    assert torch.equal(after, before) == (name == "lora_sdxl")  # whose text encoders do not train
    layers = [part for part in pipeline.unet.modules() if hasattr(part, "lora_A")]
    assert len(layers) == (0 if name == "textual_inversion" else len([*_attention(pipeline.unet)]))
    assert all(part.lora_B[next(iter(part.lora_B))].weight.any() for part in layers)


@pytest.mark.turns(2, family="plans of text recipes")
@pytest.mark.parametrize("name", ["textual_inversion", "lora_sd15", "lora_sdxl"])
def test_a_plan_knows_the_pipeline_of_the_network(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "diffusion" / f"{name}.yaml")
    assert main(["plan", "-c", config, "--json", "--no_advice"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert 0 < planned["trainable"] < 0.3 * planned["parameters"]
    assert planned["kinds"]["weights"] + planned["kinds"]["adapters"] == 4 * planned["parameters"]


@pytest.mark.turns(6, family="slow")
def test_a_plan_searches_the_batch_of_latents_without_their_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path))
    config = str(CONFIGS / "diffusion" / "lora_sd15.yaml")
    # The weights of the pipeline are not read, either.
    local_name("tiny:sd15")
    for file in (tmp_path / "tiny").rglob("*.safetensors"):
        file.unlink()
    asked = ["--solve", "train_batch_size", "--device_memory", "3MiB", "--json"]
    assert main(["plan", "-c", config, *asked]) == 0
    solved = json.loads(capsys.readouterr().out)["solve"]
    assert solved["settings"] == ["data.images.batch_size"]
    assert solved["value"] >= 4
    assert solved["peak"] <= 3 * 2**20 < solved["next_peak"]
    assert not (tmp_path / "latents").exists()


def _attention(unet: torch.nn.Module) -> list[str]:
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    return [name for name, _ in unet.named_modules() if name.endswith(ends)]

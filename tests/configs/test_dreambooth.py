"""DreamBooth from 15 photographs to diffusers' pipeline, by the recipes as they are."""

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_sample_image

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import local_name

CONFIGS = Path(__file__).parents[2] / "configs" / "diffusion"
FEW = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.logger=false"]
FEW += ["--model.init_args.sampling_steps=2", "--model.init_args.learning_rate=0.01"]


@pytest.mark.turns(4, family="shipped configs")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_photographs_become_a_lora_that_the_pipeline_loads(tmp_path, monkeypatch, family):
    diffusers = pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    whole = Image.fromarray(load_sample_image("flower.jpg"))
    for number in range(15):
        whole.crop((20 * number, 0, 20 * number + 90 + number, 100)).save(photographs / f"{number}.jpg")
    config = yaml.safe_load((CONFIGS / f"dreambooth_{family}.yaml").read_text())
    sets = config["data"]["init_args"]["images"]["init_args"]["train"]
    sets[0]["images"] = str(photographs)
    sets[1]["generate"] |= {"number": 3, "steps": 2}
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "-c", "mine.yaml", *FEW]) == 0
    assert len(list((tmp_path / "cache" / "class_images").rglob("*.png"))) == 3
    checkpoint = f"runs/diffusion/dreambooth_{family}/latest/last.ckpt"
    assert main(["export", checkpoint, "--format", "peft", "--output", "lora"]) == 0

    pipeline = diffusers.DiffusionPipeline.from_pretrained(local_name(f"tiny:{family}"))
    pipeline.set_progress_bar_config(disable=True)

    def drawn():
        noise = torch.Generator().manual_seed(0)
        named = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "pt"}
        return pipeline("a photo of sks flower", generator=noise, **named).images

    before = drawn()
    pipeline.load_lora_weights("lora")
    network = pipeline.unet if family == "sdxl" else pipeline.transformer
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    loaded = sum("lora_" in name for name, _ in network.named_parameters())
    assert loaded == sum("lora_" in name for name in saved) > 0
    assert (drawn() - before).abs().max() > 1e-4

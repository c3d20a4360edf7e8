"""DreamBooth from 15 photographs to diffusers' pipeline, by the recipes as they are."""

import json
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


@pytest.mark.turns(2, family="plans of DreamBooth")
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_plan_makes_no_class_images(tmp_path, monkeypatch, capsys, family):
    """Nor does it read weights of the pipeline that would make them. Batches are as large as with 24 of them."""
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path))
    local_name(f"tiny:{family}")
    for file in (tmp_path / "tiny").rglob("*.safetensors"):
        file.unlink()
    asked = ["--data.images.batch_size", "30", "--json", "--no_advice"]
    assert main(["plan", "-c", f"diffusion/dreambooth_{family}", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["batch"] == 30
    pictures = list((tmp_path / "class_images").rglob("*.png"))
    assert [Image.open(picture).getextrema() for picture in pictures] == [((0, 0),) * 3] * 24

"""The recipes for ControlNets and inpainting, from files to a pipeline of diffusers that predicts what the run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml

from lit_efficient import ImageData
from lit_efficient.__main__ import main
from lit_efficient.data.images.image_set import ImageSet
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.models.libraries.tiny_pipelines import local_name
from lit_efficient.tasks.loading import load_latent_diffusion
from tests.tasks.test_image_conditions import check_predictions, recorded

FOLDER = Path(__file__).parents[2] / "configs" / "diffusion"
FEW = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.init_args.sampling_steps=2"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exported(name: str, **changed: Any) -> tuple[Any, Path]:
    """Run a recipe and its export, and return the model of the checkpoint and the exported folder."""
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    written["model"]["init_args"] |= {"learning_rate": 0.05}
    written["data"]["init_args"]["images"]["init_args"] |= changed
    Path("recipe.yaml").write_text(yaml.safe_dump(written))
    assert main(["fit", "-c", "recipe.yaml", *FEW]) == 0
    run = Path("runs/diffusion", name, "latest")
    assert list(run.glob("samples/*.png"))
    assert main(["export", str(run / "last.ckpt"), "--format", "diffusers", "--output", "made"]) == 0
    model, _ = load_latent_diffusion(str(run / "last.ckpt"))
    return model, Path("made")


def batch_of(*sets: ImageSet) -> dict[str, Any]:
    data = ImageData([*sets], view=ImageView(resolution=64), batch_size=1, val_fraction=0.2)
    data.prepare_data()
    data.setup("validate")
    found: dict[str, Any] = next(iter(data.val_dataloader()))
    del found["sizes"]  # the pipeline's are those of uncropped images
    return found


@pytest.mark.turns(3, family="recipes with images")
def test_a_controlnet_from_folders_to_its_pipeline() -> None:
    model, made = exported("controlnet_sdxl")
    controlnet = diffusers.ControlNetModel.from_pretrained(made)
    pipeline = diffusers.StableDiffusionXLControlNetPipeline.from_pretrained(
        local_name("tiny:sdxl"), controlnet=controlnet
    )
    batch = batch_of(ImageSet("tiny:photos", condition="tiny:edges"))
    picture = batch["condition"] / 2 + 0.5
    steps = recorded(pipeline, prompt=batch["captions"][0], image=picture, guidance_scale=5.0, height=64, width=64)
    check_predictions(model, steps, batch, 5.0)


@pytest.mark.turns(3, family="recipes with images")
@pytest.mark.parametrize("masks", ["random", "data"])
def test_inpainting_from_folders_to_its_pipeline(masks: str) -> None:
    sets = [ImageSet("tiny:photos", mask="tiny:edges" if masks == "data" else None)]
    changed = {"train": [{"images": "tiny:photos", "mask": "tiny:edges"}]} if masks == "data" else {}
    model, made = exported("inpaint", **changed)
    pipeline = diffusers.AutoPipelineForInpainting.from_pretrained(made)
    batch = batch_of(*sets)
    mask = batch.setdefault("mask", torch.ones(1, 1, 64, 64))
    mean, _ = model.codec.encode(batch["images"] * (mask < 0.5))
    model.codec.encode = lambda images: (mean, None)  # the pipeline draws a sample of it
    pipeline._encode_vae_image = lambda image, generator: mean
    shown = {"prompt": batch["captions"][0], "image": batch["images"] / 2 + 0.5, "mask_image": mask, "strength": 1.0}
    steps = recorded(pipeline, **shown, guidance_scale=5.0, height=64, width=64)
    check_predictions(model, steps, batch, 5.0)

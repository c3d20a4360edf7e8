"""Recipes of image models for cards: shapes as published, planned peaks, and commands that run as they are printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.image_recipes import SHAPES, planned, write_pipeline
from lit_efficient.__main__ import main
from lit_efficient.files.image_recipes import CARDS, TRAINED, ImageRecipe, fitting_images, image_recipes
from lit_efficient.files.recipes import USABLE
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, from_fields, resolve
from tests.support_cli import Parts

KNOWN = image_recipes()
FEW = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
FEW += ["--trainer.logger=false", "--model.sampling_steps=2", "--data.images.view.resolution=64"]


def label(recipe: ImageRecipe) -> str:
    return f"{recipe.config.partition('/')[2]}-{recipe.rung.replace(' ', '_')}-{recipe.batch_size}"


def tiny(recipe: ImageRecipe) -> ImageRecipe:
    return replace(recipe, model=f"tiny:{SHAPES[recipe.model]['family']}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    write_pipeline(name, tmp_path / "pipeline")
    part = "unet" if "unet" in shape["parts"] else "transformer"
    with torch.device("meta"):
        network: Any = from_fields(resolve(DiffusersModelConfig(str(tmp_path / "pipeline"), subfolder=part)))
    assert sum(p.numel() for p in network.parameters()) == shape["parameters"]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", KNOWN, ids=label)
def test_the_table_holds_what_a_plan_says(recipe: ImageRecipe) -> None:
    """Never more. If less by more than a tenth, plan again: ``python -m benchmarks.image_recipes --again``."""
    plan = planned(recipe)
    assert 0.9 * recipe.peak <= plan.peak <= 1.01 * recipe.peak
    assert plan.at_least == plan.at_most == ""
    assert plan.batch == recipe.batch_size


@pytest.mark.turns(4)
@pytest.mark.parametrize("recipe", KNOWN, ids=label)
def test_a_command_resolves_to_its_rung(recipe: ImageRecipe) -> None:
    parts: Any = Parts(args=["fit", *tiny(recipe).options(), "--trainer.accelerator=cpu"])
    names = {type(callback).__name__ for callback in parts.trainer.callbacks}
    rungs = ["checkpointing", "8-bit AdamW", "bfloat16 weights", "4-bit base", "block swap"]
    added = ["ActivationCheckpointing", "LowBitOptimizer", "StochasticRounding", "QuantizeBase", "BlockSwap"]
    last = dict(zip(["bfloat16", *rungs], [None, *added]))[recipe.rung]
    assert last is None or last in names
    assert not names & set(added[added.index(last) + 1 :] if last else added)
    rounds = "StochasticRounding" in names
    assert parts.trainer.precision == ("bf16-true" if rounds else "bf16-mixed")
    frozen = TRAINED[recipe.config] != "all"
    assert parts.model.backbone.dtype == ("bfloat16" if frozen else "float32")
    assert parts.datamodule.images.view.resolution == recipe.resolution == SHAPES[recipe.model]["resolution"]
    assert parts.datamodule.images.batch_size == recipe.batch_size


def test_each_card_has_the_first_rung_that_fits_and_larger_batches_need_more() -> None:
    before: set[str] = set()
    for card in CARDS:
        found = {recipe.config: recipe for recipe in fitting_images(card * 10**9)}
        assert before <= found.keys()
        before = set(found)
        for recipe in KNOWN:
            fits = recipe.peak <= USABLE * card * 1e9
            chosen = found.get(recipe.config)
            if not fits or chosen is None:
                assert not fits
                continue
            rungs = [one.rung for one in KNOWN if one.config == recipe.config]
            assert rungs.index(chosen.rung) <= rungs.index(recipe.rung)
            if recipe.rung == chosen.rung:
                assert recipe.batch_size <= chosen.batch_size
    assert {"diffusion/lora_sdxl", "diffusion/lora_flux"} <= before <= TRAINED.keys()
    peaks = {(one.config, one.rung, one.batch_size): one.peak for one in KNOWN}
    assert all(peak > peaks[config, rung, 1] for (config, rung, batch), peak in peaks.items() if batch > 1)


@pytest.mark.turns(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("card", "config"), [(8, "diffusion/lora_sdxl"), (12, "diffusion/lora_flux")])
def test_a_printed_command_ends_in_an_export(card: int, config: str) -> None:
    """With a tiny pipeline in place of the named one, at 64 pixels."""
    [recipe] = [one for one in fitting_images(card * 10**9) if one.config == config]
    assert main(["fit", *tiny(recipe).options(), *FEW, "--trainer.accelerator=cpu"]) == 0
    checkpoint = f"runs/{config}/latest/last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    assert main(["export", checkpoint, "--format", "peft", "--output", "lora"]) == 0
    assert {path.name for path in Path("lora").glob("*.safetensors")} >= {
        "kohya.safetensors",
        "pytorch_lora_weights.safetensors",
    }

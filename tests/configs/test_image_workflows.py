"""Workflows that have no recipe of their own, as the guide describes them: from folders to pipelines of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import local_name
from tests.configs.following import CONFIGS, follow, small

pytestmark = [
    pytest.mark.turns(4, family="image workflows"),
    pytest.mark.filterwarnings("ignore"),
]
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
PAIRS = [{"images": "tiny:photos", "condition": "tiny:edges"}]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exported(capsys: pytest.CaptureFixture[str], name: str, lora: dict[str, Any] | None, **changed: Any) -> Path:
    """Run a recipe with LoRA and other arguments and the export that it prints, and return the folder.

    Args:
        capsys: Fixture.
        name: Name of the recipe.
        lora: Arguments of LoRA, which is added to the recipe, if they are given.
        changed: Arguments of the model and of the data, and the class of the model.
    """
    config = small(CONFIGS / "diffusion" / f"{name}.yaml", model={"learning_rate": 0.05, "sampling_steps": 1})
    written = yaml.safe_load(Path(config).read_text())
    if lora is not None:
        written["trainer"]["callbacks"].append({"class_path": "LoRA", "init_args": lora})
    written["model"]["class_path"] = changed.pop("task", written["model"]["class_path"])
    written["model"]["init_args"] |= changed.pop("model", {})
    if "train" in changed:
        written["data"]["init_args"]["images"]["init_args"]["train"] = changed.pop("train")
    written["data"]["init_args"] |= changed
    Path(config).write_text(yaml.safe_dump(written))
    capsys.readouterr()
    assert main(["fit", "-c", config]) == 0
    return follow(capsys.readouterr().out, "export")


def pipeline(family: str) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}")))


def adapters(network: Any) -> list[Any]:
    """Return the adapted layers of a network. Each of them has been trained."""
    layers = [part for part in network.modules() if getattr(part, "lora_A", None)]
    assert all(part.lora_B[next(iter(part.lora_B))].weight.any() for part in layers)
    return layers


def test_pivotal_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(capsys, "textual_inversion", {"rank": 2, "targets": [*ATTENTION, "q_proj", "v_proj"]})
    theirs = pipeline("sd15")
    theirs.load_lora_weights(folder)
    theirs.load_textual_inversion(folder, weight_name="learned_embeds.safetensors")
    assert len(theirs.tokenizer("<thing>").input_ids) == len(theirs.tokenizer("").input_ids) + 1
    assert len(adapters(theirs.unet)) == sum(name.endswith("to_q") for name, _ in theirs.unet.named_modules()) * 4
    assert len(adapters(theirs.text_encoder)) == 2 * theirs.text_encoder.config.num_hidden_layers


def test_a_controlnet_of_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    new = ["controlnet_down_blocks", "controlnet_mid_block", "controlnet_cond_embedding"]
    folder = exported(capsys, "controlnet_sdxl", {"rank": 2, "targets": ATTENTION, "modules_to_save": new})
    controlnet: Any = diffusers.ControlNetModel.from_pretrained(folder)
    unet = pipeline("sdxl").unet
    copied = diffusers.ControlNetModel.from_unet(unet).state_dict()
    moved = {name for name, tensor in controlnet.state_dict().items() if not torch.equal(tensor, copied[name])}
    adapted = {name for name in copied if name.endswith(tuple(f"{layer}.weight" for layer in ATTENTION))}
    assert moved - {name for name in copied if name.startswith(tuple(new))} == adapted
    assert any(name.startswith("controlnet_down_blocks") for name in moved)
    diffusers.StableDiffusionXLControlNetPipeline.from_pretrained(local_name("tiny:sdxl"), controlnet=controlnet)


@pytest.mark.turns(6, family="slow")
def test_kontext(capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(capsys, "lora_flux", None, model={"image_condition": {"kind": "sequence"}}, train=PAIRS)
    theirs = diffusers.FluxKontextPipeline(**pipeline("flux").components)
    theirs.load_lora_weights(folder)
    checkpoint = torch.load(folder.parent / "last.ckpt", weights_only=True)
    trained = [name for name in checkpoint["state_dict"] if name.endswith("lora_A")]
    assert len(adapters(theirs.transformer)) == len(trained) > 0


def test_preferences(capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"task": "DiffusionPreference", "model": {"beta": 5000.0}, "train": PAIRS, "condition": "latents"}
    folder = exported(capsys, "lora_sdxl", None, **changed)
    theirs = pipeline("sdxl")
    theirs.load_lora_weights(folder)
    assert len(adapters(theirs.unet)) == sum(name.endswith("to_q") for name, _ in theirs.unet.named_modules()) * 4

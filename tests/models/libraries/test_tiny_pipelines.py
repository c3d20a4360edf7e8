"""One config runs on a tiny pipeline of each family, and takes a folder in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient import ConfigurationError, ImageData, LatentData
from lit_efficient.__main__ import main
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.tiny_pipelines import TINY_PIPELINES, local_name
from tests.support_cli import Parts

NETWORK = "--model.init_args.backbone.name_or_path"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))


def written() -> str:
    """A config that names the network alone."""
    images = {"train": "tiny:photos", "val_fraction": 0.2, "batch_size": 4, "view": {"resolution": 64}}
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_progress_bar": False}
    trainer |= {"limit_val_batches": 1, "enable_model_summary": False}
    config = {
        "trainer": trainer,
        "model": {
            "class_path": "LatentDiffusion",
            "init_args": {"backbone": {"name_or_path": "tiny:sd15"}, "samples": {"count": 0}},
        },
        "data": {
            "class_path": "LatentData",
            "init_args": {"images": {"class_path": "ImageData", "init_args": images}, "build": True},
        },
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    return "tiny.yaml"


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", TINY_PIPELINES)
def test_a_config_trains_on_a_tiny_pipeline_and_its_encoders(family: str) -> None:
    import diffusers

    parts: Any = Parts(args=["fit", "-c", written(), NETWORK, f"tiny:{family}"])
    parts.trainer.fit(parts.model, parts.datamodule)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}")))
    data = parts.datamodule
    for name, weight in pipeline.vae.state_dict().items():
        assert torch.equal(data.codec.autoencoder.network.state_dict()[name], weight)
    ours = [part.network.state_dict() for part in data.text_encoder.parts]
    theirs = [getattr(pipeline, name).state_dict() for name in sorted(vars(pipeline)) if name.startswith("text_enc")]
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert all(torch.equal(one[name], weight) for name, weight in other.items())
    scale = pipeline.vae.config.scaling_factor
    assert data.codec.std.tolist() == pytest.approx([1 / scale] * 4)


@pytest.mark.turns(2)
@pytest.mark.filterwarnings("ignore:FusedAdamW steps")  # of the network, which trains as a whole here
@pytest.mark.parametrize(("family", "asked"), [("sdxl", {"do_classifier_free_guidance": False}), ("flux", {})])
def test_frozen_text_encoders_have_the_format_of_the_network(
    family: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in diffusers' training scripts. Embeddings in the cache are those of its pipeline in that format."""
    import diffusers

    given = ["-c", written(), NETWORK, f"tiny:{family}", "--model.backbone.dtype=bfloat16"]
    given.append("--trainer.precision=bf16-mixed")
    parts: Any = Parts(args=["fit", *given])
    parts.trainer.fit(parts.model, parts.datamodule)
    data = parts.datamodule
    assert {p.dtype for part in data.text_encoder.parts for p in part.network.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in data.codec.autoencoder.network.parameters()} == {torch.float32}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(local_name(f"tiny:{family}")))
    pipeline.to(torch.bfloat16)
    prompt = "an orange dahlia"
    with torch.no_grad():
        expected = pipeline.encode_prompt(prompt=prompt, prompt_2=None, device="cpu", **asked)
    found = data.text_encoder.encode([prompt]).hidden
    assert found.dtype == expected[0].dtype == torch.bfloat16
    assert torch.equal(found, expected[0])
    index = next(i for i in data.images.train_index if data.images.captions_of(i) == [prompt])
    assert torch.equal(data.items[index, 0]["text"], found[0])
    assert main(["cache-latents", *given]) == 0
    assert "nothing to encode" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:FusedAdamW steps")
def test_a_text_encoder_that_trains_is_in_float32() -> None:
    asked = ["--model.text_training={}", "--data.cached_text=false", "--model.backbone.dtype=bfloat16"]
    parts: Any = Parts(args=["fit", "-c", written(), *asked, "--trainer.precision=bf16-mixed"])
    parts.trainer.fit(parts.model, parts.datamodule)
    assert {p.dtype for p in parts.model.text_networks.parameters()} == {torch.float32}


def test_a_folder_takes_the_place_of_the_tiny_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    import diffusers

    diffusers.DiffusionPipeline.from_pretrained(str(local_name("tiny:sdxl"))).save_pretrained("own")
    assert main(["cache-latents", "-c", written(), NETWORK, "own"]) == 0
    capsys.readouterr()
    assert main(["cache-latents", "-c", written(), NETWORK, "tiny:sdxl"]) == 0
    assert "nothing to encode" in capsys.readouterr().out  # the same weights are in both folders


def test_an_unknown_family_and_a_network_without_a_pipeline_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"the family of 'tiny:sdl' must be one of .*sdxl"):
        DiffusersModelConfig("tiny:sdl")
    data = LatentData(ImageData("tiny:photos"), cached=False)
    with pytest.raises(ConfigurationError, match="autoencoder may be left out only where the trained network comes"):
        data.encoders()


def test_photographs_have_captions() -> None:
    data = ImageData("tiny:photos", val_fraction=0.0)
    data.prepare_data()
    assert len(data.train_index) == 15
    assert {data.dataset[index, 0]["captions"] for index in data.train_index} == {
        "a temple above trees and a lake",
        "an orange dahlia",
    }

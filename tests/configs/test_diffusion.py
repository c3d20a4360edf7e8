"""The configs for latent diffusion: all parse, and their chain runs: autoencoder, cache, diffusion, pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from tests.support_cli import Parts

FOLDER = Path(__file__).parents[2] / "configs" / "diffusion"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
COMPOSED = {"StochasticDepth", "LoRA", "ActivationCheckpointing", "ChannelsLast", "Compile", "LowBitOptimizer"}
COMPOSED |= {"EMA", "PowerEMA"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_parses_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text("utf-8")
    parts: Any = Parts(args=["fit", "-c", str(path)])
    written = yaml.safe_load(text)
    names = {type(callback).__name__ for callback in parts.trainer.callbacks}
    assert {entry["class_path"] for entry in written["trainer"]["callbacks"]} <= names
    assert names >= COMPOSED or not path.stem.endswith("_all")
    assert type(parts.model).__name__ == written["model"]["class_path"]
    header = text[: text.index("seed_everything")]
    assert f"python -m lit_efficient fit -c configs/diffusion/{path.name}" in header


def test_the_chain_of_the_photographs_ends_in_a_pipeline(tmp_path: Path) -> None:
    """As the headers say it, with few steps and nothing compiled."""
    few = ["--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_model_summary=false"]
    few += ["--trainer.check_val_every_n_epoch=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    assert main(["fit", "-c", str(FOLDER / "photos_autoencoder.yaml"), "--data.init_args.judge_steps=0", *few]) == 0
    path = FOLDER / "photos_all.yaml"
    written = yaml.safe_load(path.read_text("utf-8"))
    entries = {entry["class_path"]: entry for entry in written["trainer"]["callbacks"]}
    entries["PowerEMA"]["init_args"]["snapshot_every_n_steps"] = 1
    del entries["Compile"]  # takes a minute for this network, whatever the backend
    written["trainer"]["callbacks"] = list(entries.values())
    written["data"]["init_args"]["images"]["init_args"] |= {"crops": 4, "batch_size": 8, "judge_steps": 0}
    written["model"]["init_args"]["sampling_steps"] = 2
    Path("small.yaml").write_text(yaml.safe_dump(written))
    assert main(["cache-latents", "-c", "small.yaml"]) == 0
    assert main(["fit", "-c", "small.yaml", *few]) == 0
    arguments = ["export", "runs/diffusion/photos_all/last.ckpt", "--format", "diffusers", "--output", "pipeline"]
    assert main(arguments) == 0

    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained("pipeline")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("an orange dahlia", num_inference_steps=2, height=32, width=32, output_type="pt").images
    assert images.shape == (1, 3, 32, 32)
    assert bool(torch.isfinite(images).all())

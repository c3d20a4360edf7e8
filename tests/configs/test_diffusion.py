"""The configs for latent diffusion: all parse, and their chain runs: autoencoder, cache, diffusion, pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from tests.configs.following import fit_and_follow, made, small
from tests.data.latents.mds_kit import write_mds
from tests.support_cli import Parts

FOLDER = Path(__file__).parents[2] / "configs" / "diffusion"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
COMPOSED = {"StochasticDepth", "LoRA", "ActivationCheckpointing", "ChannelsLast", "Compile", "LowBitOptimizer"}
COMPOSED |= {"EMA", "PowerEMA"}
FEW = ["--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_model_summary=false"]
FEW += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_parses_and_says_how_to_run_it(path: Path) -> None:
    _, _, names = made(path)
    assert names >= COMPOSED or not path.stem.endswith("_all")


@pytest.mark.turns(4, family="shipped configs")
def test_the_chain_of_the_photographs_ends_in_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """As the headers say it, with few steps and nothing compiled."""
    few = [*FEW, "--trainer.check_val_every_n_epoch=1"]
    fit_and_follow(capsys, str(FOLDER / "photos_autoencoder.yaml"), "--data.init_args.judge_steps=0", *few)
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
    fit_and_follow(capsys, "small.yaml", *few)
    arguments = [
        "export",
        "runs/diffusion/photos_all/latest/last.ckpt",
        "--format",
        "diffusers",
        "--output",
        "pipeline",
    ]
    assert main(arguments) == 0

    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained("pipeline")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("an orange dahlia", num_inference_steps=2, height=32, width=32, output_type="pt").images
    assert images.shape == (1, 3, 32, 32)
    assert bool(torch.isfinite(images).all())


@pytest.mark.turns(4, family="shipped configs")
def test_a_folder_of_images_is_made_as_the_header_says_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / "images_autoencoder.yaml"
    comments = [line.removeprefix("#").removeprefix("   ") for line in path.read_text("utf-8").splitlines()]
    script = comments[comments.index("python - <<'END'") + 1 : comments.index("END")]
    exec("\n".join(script), {})
    fit_and_follow(capsys, str(path), *FEW, "--trainer.check_val_every_n_epoch=1")
    assert Path("runs/diffusion/images_autoencoder/latest/best.ckpt").is_file()

    data: Any = Parts(args=["fit", "-c", str(path)]).datamodule
    data.setup("fit")
    shapes = {tuple(batch["images"].shape[2:]) for batch in data.train_dataloader()}
    assert shapes == {(80, 48), (48, 80)}
    assert (len(data.train_index), len(data.val_index), data.class_names) == (21, 7, ["china", "flower"])


@pytest.mark.turns(4, family="shipped configs")
def test_the_latents_of_imagenet_train_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    """A few rows in the files and columns that are published; the network is smaller, and nothing is compiled."""
    codes = np.random.default_rng(0).integers(0, 256, (24, 4 * 32 * 32), dtype=np.uint8)
    columns = {"label": ("str", None), "label_as_text": ("str", None), "vae_output": ("uint8", None)}
    texts = [str(row % 7).encode() for row in range(24)]
    rows = {"label": texts, "label_as_text": texts, "vae_output": [row.tobytes() for row in codes]}
    Path("latents").mkdir()
    write_mds(Path("latents"), columns, rows, [slice(0, 9), slice(9, 24)])
    written = yaml.safe_load((FOLDER / "imagenet_int8.yaml").read_text("utf-8"))
    fast, compiled, *callbacks = written["trainer"]["callbacks"]
    written["trainer"] |= {"callbacks": [fast, *callbacks], "precision": "32-true", "val_check_interval": 2}
    written["model"]["init_args"]["backbone"]["init_args"] |= {"width": 16, "depth": 1, "heads": 2}
    written["model"]["init_args"]["sampling_steps"] = 2
    vae = {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [8], "norm_num_groups": 4}
    data = written["data"]["init_args"]
    data |= {"folder": "latents", "held_out": 4, "batch_size": 8, "num_workers": 0}
    data["autoencoder"]["init_args"] = {"config_fields": vae}
    Path("small.yaml").write_text(yaml.safe_dump(written))
    assert compiled == {"class_path": "Compile"}
    fit_and_follow(capsys, "small.yaml", *FEW)


@pytest.mark.turns(4, family="shipped configs")
def test_every_technique_at_once_on_digits(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"image_size": 8, "batch_size": 16, "autoencoder": {"width": 8}, "autoencoder_steps": 2, "judge_steps": 2}
    model = {"backbone": {"init_args": {"size": 2, "width": 16, "depth": 2, "heads": 2}}, "sampling_steps": 1}
    fit_and_follow(capsys, small(FOLDER / "digits_all.yaml", model=model, data=data))


@pytest.mark.turns(4, family="shipped configs")
@pytest.mark.parametrize("objective", ["mean_flow", "{class_path: Shortcut, init_args: {finest: 8}}"])
def test_samples_in_few_steps_on_digits(capsys: pytest.CaptureFixture[str], objective: str) -> None:
    data = {"image_size": 8, "batch_size": 16, "autoencoder": {"width": 8}, "autoencoder_steps": 2, "judge_steps": 2}
    model = {"backbone": {"size": 2, "width": 16, "depth": 1, "heads": 2}}
    config = small(FOLDER / "few_steps.yaml", model=model, data=data)
    fit_and_follow(capsys, config, f"--model.init_args.objective={objective}")

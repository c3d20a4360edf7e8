"""The command that encodes a config's images, on the very config that fit runs."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from lit_efficient import ChannelScaling, DiffusersModelConfig, TeacherFeatures
from lit_efficient.__main__ import main
from lit_efficient.commands.cache_latents import Bar
from lit_efficient.commands.preview import build_data
from lit_efficient.data.latents.latent_store import LatentStore


def config(folder: Path, **arguments) -> str:
    tree = {
        "trainer": {"max_steps": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
        "model": {
            "class_path": "LatentDiffusion",
            "init_args": {
                "backbone": {"channels": 4, "size": 4, "width": 16, "depth": 1, "heads": 2, "num_classes": 10},
                "samples": {"count": 0},
            },
        },
        "data": {
            "class_path": "LatentData",
            "init_args": {
                "images": {"class_path": "DigitImages", "init_args": {"image_size": 16, "batch_size": 16}},
                "autoencoder": {"image_channels": 1, "latent_channels": 4, "width": 8},
                "folder": str(folder / "cache"),
                **arguments,
            },
        },
    }
    tree["trainer"]["default_root_dir"] = str(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def test_the_config_that_fit_runs_is_encoded_once(tmp_path, capsys):
    path = config(tmp_path)
    assert main(["fit", "--config", path]) == 2
    assert f"There is no latent cache in {tmp_path}/cache. Make it: python -m lit_efficient" in capsys.readouterr().err
    assert main(["cache-latents", "--config", path, "--shard_rows", "700"]) == 0
    said = capsys.readouterr().out
    manifest = LatentStore(tmp_path / "cache", thorough=True).manifest
    assert "1797 of 1797 images and their variants: 1797 of 4x4x4" in said
    assert f"{manifest['bytes_per_row']:.0f} bytes per image" in said
    assert " ".join(f"{value:.4f}" for value in manifest["statistics"]["std"]) in said
    assert f"PSNR         {manifest['reconstruction_psnr_db']:.1f} dB" in said
    assert "images/s" in said
    assert len(list((tmp_path / "cache/shards").iterdir())) == 3
    assert main(["cache-latents", "--config", path]) == 0
    assert "nothing to encode" in capsys.readouterr().out
    other = ["cache-latents", "--config", path, "--data.init_args.dtype", "float16"]
    assert main(other) == 2
    assert "dtype: the cache has 'float32', this run asks for 'float16'" in capsys.readouterr().err
    assert main([*other, "--overwrite"]) == 0
    assert LatentStore(tmp_path / "cache").manifest["identity"]["dtype"] == "float16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size", "0"], "--batch_size must be a whole number of at least 1 or null, got 0"),
        (["--shard_rows", "0"], "--shard_rows must be a whole number of at least 1, got 0"),
        (["--device", "abacus"], "device must be auto, cpu, cuda, ..., got 'abacus'"),
        (["--data", "DigitImages"], "the config's data must be LatentData, got 'DigitImages'"),
    ],
)
def test_mistakes_are_told(tmp_path, capsys, arguments, message):
    assert main(["cache-latents", "--config", config(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_speed_is_that_of_what_was_encoded_now():
    bar = Bar()(total=100, done=60)
    for _ in range(4):
        bar.update(10)
    assert bar.encoded == 40
    assert bar.seconds > 0


def test_latents_of_others_by_a_config(tmp_path):
    rows = {"z": np.ones((9, 4, 2, 2), np.int8), "y": np.arange(9)}
    save_file(rows, tmp_path / "a.safetensors")
    arguments = {
        "folder": str(tmp_path),
        "fields": {"latents": "z", "label": "y"},
        "numbers": {"scale": [0.5, 1.0, 2.0, 4.0], "zero": -1.0},
        "statistics": {"mean": [0.0] * 4, "std": [1.0] * 4},
        "held_out": 2,
    }
    tree = {"model": {"class_path": "LatentDiffusion"}, "data": {"class_path": "EncodedData", "init_args": arguments}}
    (tmp_path / "encoded.yaml").write_text(yaml.safe_dump(tree))
    data = build_data(["-c", str(tmp_path / "encoded.yaml")])
    assert data.statistics == ChannelScaling([0.0] * 4, [1.0] * 4)
    data.setup("fit")
    assert data.dataset[3, 0]["latents"][:, 0, 0].tolist() == [-0.5, 0.0, 1.0, 3.0]
    assert data.num_classes == 9


def test_every_part_of_a_cache_can_be_said_in_a_config(tmp_path):
    arguments = {
        "autoencoder": {"config_fields": {"_class_name": "AutoencoderTiny", "in_channels": 1}},
        "text_encoder": {"config_fields": {"model_type": "clip_text_model", "hidden_size": 8}, "max_length": 16},
        "features": {"teacher": "data.judge", "layer": "body", "dtype": "bfloat16"},
        "statistics": "declared",
    }
    data = build_data(["-c", config(tmp_path, **arguments)])
    assert data.autoencoder == DiffusersModelConfig(config_fields=arguments["autoencoder"]["config_fields"])
    assert data.text_encoder_config.max_length == 16
    assert data.features == TeacherFeatures("data.judge", "body", dtype="bfloat16")
    other = build_data(["-c", config(tmp_path, autoencoder="runs/autoencoder/last.ckpt", cached=False)])
    assert other.autoencoder == "runs/autoencoder/last.ckpt"
    assert not other.cached

"""Models of diffusers, built small from their real configurations: what they load and refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from lit_efficient import ConfigurationError
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, build, from_fields, resolve

VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 3,
    "sample_size": 16,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    build(DiffusersModelConfig(config_fields=VAE)).save_pretrained(tmp_path / "pipeline" / "vae")
    return str(tmp_path / "pipeline")


def test_a_folder_gives_its_weights_and_its_configuration_alone_random_ones(folder: str) -> None:
    loaded, again = (build(DiffusersModelConfig(folder, subfolder="vae")) for _ in range(2))
    random = build(DiffusersModelConfig(folder, subfolder="vae", random_weights=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), again.state_dict().values()))
    assert random.config.latent_channels == 3
    assert not torch.equal(random.state_dict()["quant_conv.weight"], loaded.state_dict()["quant_conv.weight"])


def test_fields_replace_those_of_the_folder(folder: str) -> None:
    spec = DiffusersModelConfig(folder, {"scaling_factor": 0.5}, subfolder="vae")
    assert build(spec).config.scaling_factor == 0.5
    assert resolve(spec)["scaling_factor"] == 0.5


def test_the_whole_configuration_builds_the_same_shape(folder: str) -> None:
    fields = resolve(DiffusersModelConfig(folder, subfolder="vae"))
    shapes = [
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (from_fields(fields), build(DiffusersModelConfig(folder, subfolder="vae")))
    ]
    assert shapes[0] == shapes[1]


def test_the_format_of_the_numbers(folder: str) -> None:
    model = build(DiffusersModelConfig(folder, subfolder="vae", dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name_or_path must be .* has no _class_name, got None"),
        ({"config_fields": VAE, "dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"config_fields": {"_class_name": "AutoencoderKl"}}, "similar names: AutoencoderKL"),
        ({"config_fields": {"_class_name": "DDIMScheduler"}}, "must be a model of diffusers"),
        ({"config_fields": {**VAE, "latent_chanels": 4}}, "similar fields: latent_channels"),
        ({"config_fields": {**VAE, "norm_num_groups": 3}}, "do not make a AutoencoderKL"),
        ({"config_fields": {**VAE, "norm_num_groups": 0}}, r"do not make a AutoencoderKL: .* \(norm_num_groups: 0"),
        ({"config_fields": {**VAE, "layers_per_block": -7}}, r"config_fields\.layers_per_block must be .* got -7"),
        ({"config_fields": {**VAE, "in_channels": 0}}, r"is empty \(in_channels: 0"),
        ({"config_fields": {"clas_name": "AutoencoderKL"}}, "did you mean '_class_name'"),
        (
            {"config_fields": {**VAE, "block_out_channels": None}},
            "do not make a AutoencoderKL: .* \\(block_out_channels: null",
        ),
        ({"name_or_path": "/nowhere/at/all"}, "there is no folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(DiffusersModelConfig(**arguments))


def test_a_pipelines_folder_asks_for_the_subfolder(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="needs subfolder"):
        build(DiffusersModelConfig(folder))
    with pytest.raises(ConfigurationError, match="subfolder: nothing"):
        build(DiffusersModelConfig(folder, subfolder="nothing"))


def test_weights_of_one_variant_are_found_by_their_files(folder: str, tmp_path: Path) -> None:
    config = DiffusersModelConfig(folder, subfolder="vae", dtype="float16")
    build(config).save_pretrained(tmp_path / "half" / "vae", variant="fp16")
    theirs = diffusers.AutoencoderKL.from_pretrained(tmp_path / "half", subfolder="vae", variant="fp16").state_dict()
    ours = build(DiffusersModelConfig(str(tmp_path / "half"), subfolder="vae")).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor.float(), theirs[name].float()) for name, tensor in ours.items())
    build(config).save_pretrained(tmp_path / "half" / "vae", variant="ema")
    with pytest.raises(ConfigurationError, match=r"2 variants \(ema, fp16\), and none without a variant"):
        build(DiffusersModelConfig(str(tmp_path / "half"), subfolder="vae"))
    build(DiffusersModelConfig(folder, subfolder="vae")).save_pretrained(tmp_path / "half" / "vae")
    assert build(DiffusersModelConfig(str(tmp_path / "half"), subfolder="vae"))


@pytest.mark.parametrize(
    ("key", "pipeline"),
    [
        ("conditioner.embedders.1.model.ln_final.weight", "StableDiffusionXLPipeline"),
        ("cond_stage_model.transformer.text_model.final_layer_norm.weight", "StableDiffusionPipeline"),
        ("model.diffusion_model.double_blocks.0.img_attn.proj.weight", "FluxPipeline"),
    ],
)
def test_a_checkpoint_in_one_file_is_refused_with_the_line_that_converts_it(
    key: str, pipeline: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({key: torch.zeros(1)}, file)
    with pytest.raises(ConfigurationError, match="is a checkpoint in one file") as refused:
        build(DiffusersModelConfig(str(file)))
    code = re.search(r'python -c "(.*)"', str(refused.value))
    assert code is not None
    compile(code[1], "line", "exec")
    assert f"from diffusers import {pipeline} as P; P.from_single_file('{file}')" in code[1]
    assert callable(getattr(diffusers, pipeline).from_single_file)

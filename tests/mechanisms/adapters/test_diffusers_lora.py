"""Files of the export for diffusers and for ComfyUI have the effect of the run, by the programs that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lit_efficient import ConfigurationError, LoRA
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.diffusers_lora import write_diffusers_lora, write_kohya
from lit_efficient.mechanisms.adapters.peft_folder import placement
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from lit_efficient.models.libraries.diffusers_model import from_fields
from lit_efficient.models.libraries.tiny_pipelines import TINY_PIPELINES
from tests import tiny_pipelines
from tests.mechanisms.adapters.test_lora_files import Trains, denoiser, pipeline_of, predicted, started
from tests.support import QUIET
from tests.support_cli import export
from tests.tasks.test_single_files import of_flux, of_sd3

# Without upsamplers: that of the tiny SDXL has no attention before it, so that diffusers does not find it.
EVERY = ["to_q", "to_k", "to_v", r"to_out\.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp"]
EVERY += ["proj_in", "proj_out", "proj", "linear", "linear_1", "x_embedder", "conv1", "time_emb_proj"]
EVERY += [r"downsamplers\.0\.conv"]


def trained(network: Any, **arguments: Any) -> tuple[Trains, dict[str, Any]]:
    """A module with random adapters, and its placement and arguments."""
    module = Trains(network)
    wanted = [
        name
        for name in EVERY
        if any(f".{key}".endswith(f".{name}".replace("\\", "")) for key, _ in network.named_modules())
    ]
    technique = LoRA(**{"rank": 3, "alpha": 5.0, "targets": wanted, **arguments})
    apply(module, [technique])
    generator = torch.Generator().manual_seed(4)
    for name, parameter in module.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return module, technique.arguments()


def write(module: Trains, arguments: dict[str, Any], folder: Path) -> None:
    where = placement(module)
    tensors, config = to_peft(module.state_dict(), where, arguments)
    write_diffusers_lora(folder, tensors, config)
    write_kohya(folder, tensors, config, where["networks"])


@pytest.mark.parametrize("variant", ["lora", "rslora", "pissa", "dora"])
@pytest.mark.parametrize("family", TINY_PIPELINES)
def test_each_layout_has_the_effect_of_the_run(family: str, variant: str, tmp_path: Path) -> None:
    module, arguments = trained(denoiser(pipeline_of(family)), variant=variant)
    expected = predicted(module.network)
    assert not torch.allclose(expected, predicted(denoiser(pipeline_of(family))), atol=1e-2)
    write(module, arguments, tmp_path)
    count = len(placement(module)["kinds"])
    readers = ["pytorch_lora_weights.safetensors"]
    if family in ("sd15", "sdxl") and variant != "dora":  # diffusers ignores kohya's magnitudes
        readers.append("kohya.safetensors")
    for file in readers:
        pipeline = pipeline_of(family)
        pipeline.load_lora_weights(tmp_path, weight_name=file)
        layers = [part for part in denoiser(pipeline).modules() if getattr(part, "lora_A", None)]
        assert len(layers) == count
        torch.testing.assert_close(predicted(denoiser(pipeline)), expected, rtol=1e-4, atol=1e-5)
    for file in ("pytorch_lora_weights.safetensors", "kohya.safetensors"):
        again, _ = started(denoiser(pipeline_of(family)), tmp_path / file)
        torch.testing.assert_close(predicted(again.network), expected, rtol=1e-4, atol=1e-5)
    layers = {key.partition(".")[0] for key in load_file(tmp_path / "kohya.safetensors")}
    names = {"sd15": "down_blocks", "sdxl": "input_blocks", "sd3": "joint_blocks", "flux": "double_blocks"}
    assert any(layer.startswith(f"lora_unet_{names[family]}_") for layer in layers)


def test_diffusers_reads_the_file_of_a_flux_of_real_width(tmp_path: Path) -> None:
    """Its converter of kohya's format knows no other width."""
    import diffusers

    with torch.device("meta"):
        fields = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
        network: Any = from_fields({**fields, "guidance_embeds": True})
    module = Trains(network)
    layers = ["to_q", "to_v", "to_k", "proj_mlp", "add_q_proj", "add_k_proj", "add_v_proj", r"attn.to_out\.0"]
    layers += ["norm1.linear", r"net\.2", r"\d+\.proj_out"]  # diffusers leaves the last layer out
    module.network = network.to_empty(device="cpu")  # pages that nobody writes take no memory
    technique = LoRA(rank=3, alpha=6.0, targets=layers)
    apply(module, [technique])
    generator = torch.Generator().manual_seed(4)
    for name, parameter in module.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(generator=generator)
    write(module, technique.arguments(), tmp_path)
    with torch.device("meta"):
        fresh: Any = from_fields({**fields, "guidance_embeds": True})
    others = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(transformer=fresh.to_empty(device="cpu"), scheduler=scheduler, **others)
    pipeline.load_lora_weights(tmp_path, weight_name="kohya.safetensors")
    found = {name: part for name, part in fresh.named_modules() if getattr(part, "lora_A", None)}
    assert found.keys() == placement(module)["kinds"].keys()
    for name, part in found.items():
        a, b = (one["default_0"].weight for one in (part.lora_A, part.lora_B))
        own: Any = module.network.get_submodule(name)
        vector = torch.randn(a.shape[1], generator=generator)
        theirs = part.scaling["default_0"] * (b @ (a @ vector))
        torch.testing.assert_close(theirs, own.lora_scale * (own.lora_B @ (own.lora_A @ vector)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_comfyui_reads_the_file_of_kohya(family: str, tmp_path: Path) -> None:
    """Its key map of any model: ``lora_unet_`` and the name in the file of the authors, with ``_`` for each dot."""
    module, arguments = trained(denoiser(pipeline_of(family)))
    write(module, arguments, tmp_path)
    file = load_file(tmp_path / "kohya.safetensors")
    base = denoiser(pipeline_of(family))
    in_one_file = {"sd3": of_sd3, "flux": of_flux}[family]
    weights = {name.removeprefix("model."): one.clone() for name, one in in_one_file(base.state_dict()).items()}
    for name, weight in weights.items():
        key = f"lora_unet_{name.removeprefix('diffusion_model.').removesuffix('.weight').replace('.', '_')}"
        if name.endswith(".weight") and f"{key}.lora_up.weight" in file:
            up, down = (file.pop(f"{key}.lora_{one}.weight").flatten(1) for one in ("up", "down"))
            weight.add_((float(file.pop(f"{key}.alpha")) / len(down) * up @ down).view_as(weight))
    assert not file  # ComfyUI would say "lora key not loaded"
    merged = base.state_dict()
    for name in placement(module)["kinds"]:
        own: Any = module.network.get_submodule(name)
        change = own.lora_scale * own.lora_B.flatten(1) @ own.lora_A.flatten(1)
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + change.detach().view_as(merged[f"{name}.weight"])
    for name, wanted in in_one_file(merged).items():
        torch.testing.assert_close(weights[name.removeprefix("model.")], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen_image", "z_image"])
def test_diffusers_reads_the_file_of_kohya(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = ["to_q", "to_v", r"to_out\.0", r"net\.2" if family == "qwen_image" else "w2"]
    module, arguments = trained(denoiser(tiny_pipelines.FAMILIES[family]()), targets=layers)
    write(module, arguments, tmp_path)
    pipeline = tiny_pipelines.FAMILIES[family]()
    pipeline.load_lora_weights(tmp_path, weight_name="kohya.safetensors")
    found = {name: part for name, part in denoiser(pipeline).named_modules() if getattr(part, "lora_A", None)}
    assert found.keys() == placement(module)["kinds"].keys()
    for name, part in found.items():
        a, b = (one["default_0"].weight for one in (part.lora_A, part.lora_B))
        own: Any = module.network.get_submodule(name)
        torch.testing.assert_close(part.scaling["default_0"] * b @ a, own.lora_scale * own.lora_B @ own.lora_A)


def test_a_family_without_a_reader_gets_no_file_of_kohya(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Trains(denoiser(tiny_pipelines.sana()).train())
    run = pl.Trainer(callbacks=[LoRA(rank=2, alpha=3.0, targets=["to_q", "conv_point"])], **QUIET, max_steps=1)
    run.fit(module, torch.utils.data.DataLoader(torch.zeros(1)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out"), "--no-check"]) == 0
    said = "without kohya.safetensors, which no program reads for SanaTransformer2DModel"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "kohya.safetensors").exists()
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()


def test_a_convolution_in_groups_is_refused(tmp_path: Path) -> None:
    name = "transformer.transformer_blocks.0.ff.conv_depth"
    width = denoiser(tiny_pipelines.sana()).transformer_blocks[0].ff.conv_depth.out_channels
    factors = {"lora_A": torch.ones(2, 1, 3, 3), "lora_B": torch.ones(width, 2, 1, 1)}
    save_file({f"{name}.{kind}.weight": one for kind, one in factors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match=r"ff.conv_depth, a convolution in groups, and LoRA adapts .* without"):
        started(denoiser(tiny_pipelines.sana()), tmp_path / "a.safetensors")


@pytest.mark.parametrize("targets", [["to_q", "to_v"], ["to_k", "proj_mlp"]])
def test_a_part_of_the_stacked_layers(targets: list[str], tmp_path: Path) -> None:
    module, arguments = trained(denoiser(pipeline_of("flux")), targets=targets)
    write(module, arguments, tmp_path)
    again, _ = started(denoiser(pipeline_of("flux")), tmp_path / "kohya.safetensors")
    torch.testing.assert_close(predicted(again.network), predicted(module.network), rtol=1e-4, atol=1e-5)


def test_dora_on_a_part_of_the_stacked_layers_has_no_file_of_kohya(tmp_path: Path) -> None:
    module, arguments = trained(denoiser(pipeline_of("flux")), targets=["to_q", "to_v"], variant="dora")
    with pytest.warns(
        UserWarning, match=r"kohya.safetensors is not written: .*img_attn.qkv for .* Name all in targets"
    ):
        write(module, arguments, tmp_path)
    assert not (tmp_path / "kohya.safetensors").exists()
    assert (tmp_path / "pytorch_lora_weights.safetensors").exists()


def test_text_encoders_are_in_the_file_of_kohya(tmp_path: Path) -> None:
    pipeline = pipeline_of("sdxl")
    module = Trains(pipeline.unet)
    module.text_encoder = pipeline.text_encoder
    module.text_encoder_2 = pipeline.text_encoder_2
    technique = LoRA(rank=2, targets=["to_q", "q_proj", "out_proj", "fc1"])
    apply(module, [technique])
    for name, parameter in module.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.5)
    where = placement(module)
    tensors, config = to_peft(module.state_dict(), where, technique.arguments())
    write_kohya(tmp_path, tensors, config, where["networks"])
    theirs = pipeline_of("sdxl")
    theirs.load_lora_weights(tmp_path / "kohya.safetensors")
    ids = torch.tensor([[5, 9, 80, 1, 0, 0]])
    torch.testing.assert_close(predicted(theirs.unet), predicted(module.network), rtol=1e-4, atol=1e-5)
    for name in ("text_encoder", "text_encoder_2"):
        expected = getattr(module, name)(ids).last_hidden_state
        base = getattr(pipeline_of("sdxl"), name)(ids).last_hidden_state
        torch.testing.assert_close(getattr(theirs, name)(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(base, expected, atol=1e-3)

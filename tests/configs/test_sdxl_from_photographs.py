"""SDXL in the layouts that people have, and a folder of photographs, become a LoRA for diffusers and ComfyUI.

The pipeline has SDXL's three blocks a side and is written by diffusers. The photographs are of several sizes and kinds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images

from lit_efficient.__main__ import main
from lit_efficient.models.libraries.tiny_pipelines import tiny_clip, tiny_encoders, tiny_vae
from tests.configs.following import follow
from tests.tasks.test_pipeline_predictions import open_clip, original_vae

FEW = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.init_args.sampling_steps=2"]
FEW += ["--model.init_args.learning_rate=0.01"]


@pytest.mark.turns(3, family="shipped configs")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["float32", "fp16", "one file"])
def test_copied_config_three_edits_and_both_consumers(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    photographs()
    named, base = written(layout)
    assert main(["copy", "diffusion/lora_sdxl", "mine.yaml"]) == 0
    text = Path("mine.yaml").read_text()
    edits = {
        "name_or_path: tiny:sdxl": named,
        "train: tiny:photos": "train: photos",
        "resolution: 64": "resolution: 32",
    }
    for was, new in edits.items():
        assert text.count(was) == 1
        text = text.replace(was, new)
    Path("mine.yaml").write_text(text)
    capsys.readouterr()
    assert main(["fit", "-c", "mine.yaml", *FEW]) == 0
    run = Path("runs/diffusion/lora_sdxl/latest")
    exported = follow(capsys.readouterr().out, "export")
    assert f"| Base | {re.search(r'name_or_path: (.*)', named)[1]} |" in (exported / "README.md").read_text()  # type: ignore[index]

    checkpoint = torch.load(run / "step_000002.ckpt", weights_only=True)
    factors = {name.removeprefix("network."): one for name, one in checkpoint["state_dict"].items() if "lora_" in name}
    layers = [name.removesuffix(".lora_A") for name in factors if name.endswith("lora_A")]
    assert len(layers) == 4 * 2 * (2 * 1 + 2 * 2 + 2 + 3 * 2 + 3 * 1)  # q, k, v and out of two attentions in each block
    trained = changed(base, {name: factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"] for name in layers})
    expected = predicted(trained)
    assert (predicted(base.unet) - expected).abs().max() > 1e-3

    for file in ("pytorch_lora_weights.safetensors", "kohya.safetensors"):
        pipeline = pipeline_of(layout)
        pipeline.load_lora_weights(exported, weight_name=file)
        loaded = [name for name, part in pipeline.unet.named_modules() if getattr(part, "lora_A", None)]
        assert sorted(loaded) == sorted(layers)
        torch.testing.assert_close(predicted(pipeline.unet), expected, rtol=1e-5, atol=1e-5)

    # ComfyUI finds the layers by the names of their authors, and leaves others out with a warning.
    state = load_file(exported / "kohya.safetensors")
    keys = {name: f"lora_unet_{authors_name(name).replace('.', '_')}" for name in layers}
    parts = ("lora_up.weight", "lora_down.weight", "alpha")
    assert state.keys() == {f"{key}.{part}" for key in keys.values() for part in parts}
    updates = {}
    for name, key in keys.items():
        up, down, alpha = (state[f"{key}.{part}"] for part in parts)
        updates[name] = alpha / len(down) * up @ down
    torch.testing.assert_close(predicted(changed(base, updates)), expected, rtol=1e-5, atol=1e-5)


def photographs() -> None:
    """Write 15 photographs: JPEG and PNG, one turned by its EXIF, one transparent, one grey, and all with captions."""
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    Path("photos").mkdir()
    for number in range(15):
        photo = whole[number % 2].crop((20 * number, 10, 20 * number + 60 + number, 90 - number))
        options: dict[str, Any] = {}
        if number == 3:
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = 6
        elif number == 5:
            photo.putalpha(Image.new("L", photo.size, 100))
        elif number == 7:
            photo = photo.convert("L")
        file = Path("photos", f"IMG_{number:04}.{'png' if number % 2 else 'jpg'}")
        photo.save(file.with_suffix(".JPG") if number == 3 else file, **options)
        file.with_suffix(".txt").write_text(f"photo {number} of a {('temple', 'dahlia')[number % 2]}")
    Path("photos/.DS_Store").write_bytes(b"Bud1")  # of macOS


def written(layout: str) -> tuple[str, Any]:
    """Write the pipeline in a layout; return the line that names it in a config, and the pipeline in float32."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=4,
        block_out_channels=(8, 16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(1, 2, 2),
        cross_attention_dim=48,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 6,
        use_linear_projection=True,
        norm_num_groups=4,
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(scaling_factor=0.13025, force_upcast=True),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        **tiny_encoders(tiny_clip(16, "CLIPTextModel"), tiny_clip(32)),
    )
    if layout == "fp16":
        pipeline.to(torch.float16).save_pretrained("sdxl", variant="fp16")
        return "name_or_path: sdxl", pipeline_of(layout)
    pipeline.save_pretrained("sdxl")
    if layout == "float32":
        return "name_or_path: sdxl", pipeline
    tensors = {f"model.diffusion_model.{authors_name(name)}": one for name, one in unet.state_dict().items()}
    tensors |= {f"first_stage_model.{name}": tensor for name, tensor in original_vae(pipeline.vae).items()}
    for name, tensor in pipeline.text_encoder.state_dict().items():
        tensors[f"conditioner.embedders.0.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    tensors |= open_clip(pipeline.text_encoder_2, "conditioner.embedders.1.model.")
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, "civitai.safetensors")
    return "name_or_path: civitai.safetensors\n        config: sdxl", pipeline


def pipeline_of(layout: str) -> Any:
    variant = "fp16" if layout == "fp16" else None
    return diffusers.StableDiffusionXLPipeline.from_pretrained("sdxl", variant=variant, dtype=torch.float32)


PARTS = {"conv_in.": "input_blocks.0.0.", "conv_norm_out.": "out.0.", "conv_out.": "out.2."}
PARTS |= {"time_embedding.linear_1.": "time_embed.0.", "time_embedding.linear_2.": "time_embed.2."}
PARTS |= {"add_embedding.linear_1.": "label_emb.0.0.", "add_embedding.linear_2.": "label_emb.0.2."}
PARTS |= {"mid_block.resnets.0.": "middle_block.0.", "mid_block.resnets.1.": "middle_block.2."}
PARTS |= {"mid_block.attentions.0.": "middle_block.1."}
RESNET = {"norm1.": "in_layers.0.", "conv1.": "in_layers.2.", "time_emb_proj.": "emb_layers.1."}
RESNET |= {"norm2.": "out_layers.0.", "conv2.": "out_layers.3.", "conv_shortcut.": "skip_connection."}


def authors_name(name: str) -> str:
    """Return the name of a layer or tensor of SDXL's UNet in the code of its authors."""
    for ours, theirs in PARTS.items():
        name = re.sub(f"^{re.escape(ours)}", theirs, name)
    found = re.match(r"(down|up)_blocks\.(\d)\.(resnets|attentions|downsamplers|upsamplers)\.(\d)\.", name)
    if found:
        side, block, kind, layer = found[1], int(found[2]), found[3], int(found[4])
        rest = name[found.end() :]
        if side == "down":
            place = f"input_blocks.{1 + 3 * block + layer}.{int(kind == 'attentions')}."
        else:
            place = f"output_blocks.{3 * block + layer}.{int(kind == 'attentions')}."
        if kind == "downsamplers":
            place, rest = f"input_blocks.{3 + 3 * block}.0.", rest.replace("conv.", "op.")
        if kind == "upsamplers":
            place = f"output_blocks.{3 * block + 2}.2."
        name = place + rest
    if found is None or found[3] == "resnets":
        for ours, theirs in RESNET.items():
            name = re.sub(rf"^(\w+\.\d+\.(?:\d\.)?){ours}", rf"\g<1>{theirs}", name)
    return name


def changed(pipeline: Any, updates: dict[str, torch.Tensor]) -> Any:
    """Return a copy of a pipeline's UNet with updates of its weights."""
    unet = diffusers.UNet2DConditionModel.from_config(pipeline.unet.config).eval()
    state = {name: tensor.clone() for name, tensor in pipeline.unet.state_dict().items()}
    for name, update in updates.items():
        state[f"{name}.weight"] += update
    unet.load_state_dict(state)
    return unet


@torch.no_grad()
def predicted(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((1, 4, 4, 4), (1, 5, 48), (1, 6))]
    added = {"text_embeds": drawn[2], "time_ids": torch.tensor([[32.0, 32, 0, 0, 32, 32]])}
    result: torch.Tensor = unet.eval()(drawn[0], torch.tensor([400]), drawn[1], added_cond_kwargs=added).sample
    return result

"""What an export takes from a checkpoint, and what it says where no pipeline of diffusers fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import (
    EMA,
    AutoencoderConfig,
    DiffusersModelConfig,
    DiTVariant,
    LatentDiffusion,
    LoRA,
    QuantizeBase,
    Samples,
    StochasticDepth,
    TokenRouting,
    merge_adapters,
)
from lit_efficient.export import pipelines
from lit_efficient.files.sums import check_sums
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.models.libraries.dit_to_diffusers import to_diffusers
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.models.networks.autoencoder import Autoencoder
from tests.export.test_pipelines import (
    CLIP,
    CONDITIONED,
    DIT,
    FREE,
    PIXART,
    SD3,
    STD,
    T5,
    THEIR_DIT,
    VP,
    exported,
    made,
    of,
    trained,
    written,
)
from tests.models.libraries.diffusers_autoencoders import DC, TINY, small
from tests.support_cli import export

V: dict[str, Any] = {"prediction": "v", "schedule": VP}


def weights(folder: Path, name: str = "transformer") -> dict[str, torch.Tensor]:
    return load_file(folder / name / "diffusion_pytorch_model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_checkpoint_of_weights_alone_has_the_average_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = made(**V, backbone=replace(DIT, depth=2))
    full = trained(tmp_path / "full.ckpt", module, EMA(decay=0.9, warmup=None), StochasticDepth(0.5))
    checkpoint = torch.load(full, weights_only=True)
    average = checkpoint["callbacks"]["EMA"]["average"]
    checkpoint["state_dict"] |= average
    checkpoint["lit_efficient"]["weights"] = "ema"
    del checkpoint["callbacks"]
    alone = tmp_path / "alone.ckpt"
    torch.save(checkpoint, alone)
    assert same(weights(exported(alone, "alone")), weights(exported(full, "ema", "--weights", "ema")))
    assert not same(weights(tmp_path / "alone"), weights(exported(full, "raw", "--weights", "raw")))
    assert "the ema weights" in (tmp_path / "alone" / "README.md").read_text()
    assert "the raw weights" in (tmp_path / "raw" / "README.md").read_text()
    refuse(alone, capsys, r"holds only the weights 'ema', and no raw weights", "--weights", "raw")
    plain = written(made(**V), tmp_path / "plain.ckpt")
    refuse(plain, capsys, r"holds no average", "--weights", "ema")


def test_adapters_beside_a_base_of_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = made(**V)
    base = written(module, tmp_path / "base.ckpt")
    adapted = trained(tmp_path / "adapted.ckpt", module, LoRA(rank=2))
    module.network.requires_grad_(True)
    merged = weights(exported(adapted, "merged", "--base", str(base)))
    plain = weights(exported(base, "plain"))
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, merged[name])}
    assert "transformer_blocks.0.attn1.to_q.weight" in changed
    assert not any(name.endswith("bias") for name in changed)
    refuse(adapted, capsys, r"trained with other frozen weights.*train with save_base=True")
    refuse(adapted, capsys, r"DiTPipeline cannot load adapters: use lora=merged", "--base", str(base),
           "--lora", "diffusers")  # fmt: skip
    empty = tmp_path / "empty.ckpt"
    torch.save({"state_dict": {"other.weight": torch.zeros(1)}}, empty)
    refuse(adapted, capsys, r"base has no weight of this network", "--base", str(empty))


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["unet", "free"])
def test_adapters_beside_a_folder_of_diffusers_are_exported_with_its_weights(kind: str, tmp_path: Path) -> None:
    """By the name in the checkpoint, or by the file that the folder's weights are in."""
    of_text = kind == "unet"
    arguments = {"text": CLIP} if of_text else {"guidance_scale": 1.0}
    source = made(**V, **arguments, backbone=of(CONDITIONED if of_text else FREE))
    source.network.save_pretrained(tmp_path / "base")
    module = LatentDiffusion(
        DiffusersModelConfig(str(tmp_path / "base")), **V, samples=Samples(0), sampling_steps=5,
        guidance_scale=source.guidance_scale,
    )  # fmt: skip
    module.codec, module.text_encoder = source.codec, source.text_encoder
    adapters = LoRA(rank=2, alpha=8, targets=["to_q", "to_v"] if of_text else ["conv1"])
    path = trained(tmp_path / "run.ckpt", module, adapters)
    kept = torch.load(path, weights_only=True)
    assert "network.conv_in.weight" not in kept["state_dict"]
    assert kept["hyper_parameters"]["backbone"]["name_or_path"] == str(tmp_path / "base")
    found = weights(exported(path, "merged"), "unet")
    merge_adapters(module)
    assert same(module.network.state_dict(), found)
    base = load_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(found["conv_in.weight"], base["conv_in.weight"])
    assert not same(found, base)
    if of_text:
        assert same(base, weights(exported(path, "beside", "--lora", "diffusers"), "unet"))
    moved = (tmp_path / "base").rename(tmp_path / "moved") / "diffusion_pytorch_model.safetensors"
    assert same(found, weights(exported(path, "moved run", "--base", str(moved)), "unet"))


@pytest.mark.turns(2)
@pytest.mark.parametrize("beside", [False, True])
def test_a_quantised_base_is_exported_as_the_floats_that_it_stands_for(beside: bool, tmp_path: Path) -> None:
    """Its adapters merged, or beside it."""
    arguments = {"text": CLIP, "backbone": of(CONDITIONED)} if beside else {"backbone": replace(DIT, width=32)}
    module = made(**V, **arguments)
    adapters = LoRA(rank=2, alpha=8, save_base=True, **({"targets": ["to_q", "to_k", "to_v"]} if beside else {}))
    techniques = QuantizeBase("nf4", double_quant=False), adapters
    path = trained(tmp_path / "run.ckpt", module, *techniques)
    folder = exported(path, "out", *(["--lora", "diffusers"] if beside else []))
    if not beside:
        merge_adapters(module)
        assert same(weights(folder), to_diffusers(module.network).state_dict())
        return
    found = weights(folder, "unet")
    added = load_file(folder / "pytorch_lora_weights.safetensors")
    names = {name.removeprefix("unet.").rpartition(".lora_")[0] for name in added}
    merged = weights(exported(path, "merged"), "unet")
    assert {name for name in found if not torch.equal(found[name], merged[name])} == {f"{n}.weight" for n in names}
    for name in names:
        delta = 4.0 * added[f"unet.{name}.lora_B.weight"] @ added[f"unet.{name}.lora_A.weight"]  # alpha / rank
        torch.testing.assert_close(merged[f"{name}.weight"], found[f"{name}.weight"] + delta)


def test_diffusers_finds_other_weights_in_a_fresh_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(made(**V), tmp_path / "run.ckpt")
    right = pipelines._pipeline

    def moved(module: Any, network: Any, **options: bool) -> Any:
        with torch.no_grad():
            next(network.parameters()).add_(1e-3)
        return right(module, network, **options)

    with monkeypatch.context() as wrong:
        wrong.setattr(pipelines, "_pipeline", moved)
        refuse(
            path,
            capsys,
            r"diffusers loads other weights than were written: 1 of \d+ tensors differ or are missing, first",
        )
    assert export([str(path), "--format", "diffusers", "--output", str(tmp_path / "out")]) == 0
    assert re.search(r"raw weights; diffusers loads the \d+ tensors that were written", capsys.readouterr().err)
    check_sums(tmp_path / "out")


def refuse(path: Path, capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    output = path.parent / "refused"
    assert export([str(path), "--format", "diffusers", "--output", str(output), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert not output.exists()


def _own_autoencoder(module: LatentDiffusion) -> None:
    channels = module.shape.channels
    own = Autoencoder(AutoencoderConfig(latent_channels=channels, width=8))
    module.codec = LatentCodec(own, torch.zeros(channels), torch.ones(channels))


def _no_codec(module: LatentDiffusion) -> None:
    module.codec = None


def _no_text(module: LatentDiffusion) -> None:
    module.text_encoder = None


def _tiny(module: LatentDiffusion) -> None:
    module.codec = LatentCodec(small(TINY), torch.zeros(3), STD)


def _deep(module: LatentDiffusion) -> None:
    module.codec = LatentCodec.declared(small(DC, latent_channels=3))


def _earlier_layer(module: LatentDiffusion) -> None:
    module.text_encoder = TextEncoder.load(TextEncoderConfig(config_fields=CLIP, max_length=24, layer=-2))


def _wide(module: LatentDiffusion) -> None:
    module.latent_size = (4, 8)


def _half(module: LatentDiffusion) -> None:
    module.latent_size = (2, 2)


SANA = {
    "_class_name": "SanaTransformer2DModel", "in_channels": 3, "out_channels": 3, "num_attention_heads": 2,
    "attention_head_dim": 8, "num_layers": 1, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
    "cross_attention_dim": 16, "caption_channels": 16, "sample_size": 4,
}  # fmt: skip
PROJECTED = {**CLIP, "architectures": ["CLIPTextModelWithProjection"]}
OF_TEXT = {**V, "text": CLIP, "backbone": of(CONDITIONED)}
SDXL = {
    **CONDITIONED, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + 16,
}  # fmt: skip
UNGUIDED = {**V, "guidance_scale": 1.0}
RESCALED = Sampler(guidance_rescale=0.7)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        (V, _own_autoencoder, r"no class for this package's autoencoder.*AutoencoderKL"),
        (V, _no_codec, r"has no autoencoder"),
        (V, _tiny, r"AutoencoderTiny have a mean and a scale for each channel"),
        ({**V, "backbone": replace(DIT, variant=DiTVariant("rope"))}, None, r"cannot hold variant.positions='rope'"),
        ({**V, "backbone": replace(DIT, variant=DiTVariant())}, None, r"train with variant.time_embedding='diffusers'"),
        ({"schedule": "edm", "prediction": "edm", "timestep_sampling": "log_normal"}, None, r"DiTPipeline does not sc"),
        ({"schedule": "cosine", "prediction": "eps"}, None, r"no scheduler of diffusers .* eps does not determine"),
        ({"schedule": "flow", "prediction": "v"}, None, r"no scheduler of diffusers .* 'flow'"),
        ({**V, "sampling_steps": 7}, None, r"sampling_steps must be a divisor of 1000"),
        ({**V, "backbone": of({**FREE, "num_class_embeds": 5})}, None, r"passes labels to a UNet2DModel"),
        ({**UNGUIDED, "backbone": of(FREE)}, _wide, r"square latents.*UNet2DModel .* latents of size \(4, 8\)"),
        (OF_TEXT, _wide, r"square latents.*UNet2DConditionModel .* latents of size \(4, 8\)"),
        (V, _wide, r"square latents.*DiTTransformer2DModel .* latents of size \(4, 8\)"),
        ({**V, "backbone": of(THEIR_DIT)}, _half, r"of the network's sample_size 4, .* latents of size \(2, 2\)"),
        ({**V, "sampler": RESCALED}, None, r"DiTPipeline cannot rescale its guidance.*Sampler\(guidance_rescale=0.7"),
        ({**V, "text": T5, "backbone": of(PIXART), "sampler": RESCALED}, None, r"PixArtAlphaPipeline cannot rescale"),
        ({"text": T5, "backbone": of(SD3), "sampler": RESCALED}, None, r"StableDiffusion3Pipeline cannot rescale"),
        ({**V, "guidance_scale": 0.5}, None, r"treat guidance_scale=0.5 as 1"),
        ({**OF_TEXT, "guidance_scale": 0.0}, None, r"treat guidance_scale=0.0 as 1"),
        ({**V, "sampler": Sampler(shift=3.0)}, None, r"of 'scaled_linear' have no shift, .*shift=3.0"),
        ({**OF_TEXT, "backbone": of({**CONDITIONED, "num_class_embeds": 5})}, None, r"text and no label"),
        (OF_TEXT, _no_text, r"StableDiffusionPipeline encodes prompts"),
        (OF_TEXT, _earlier_layer, r"differently from training .*layer=-2.* see all tokens"),
        ({**V, "text": CLIP, "backbone": of(SDXL)}, None, r"StableDiffusionXLPipeline has 2 text encoders, .* had 1"),
        (OF_TEXT, _deep, r"StableDiffusionPipeline .* AutoencoderDC"),
        ({**OF_TEXT, "text": PROJECTED}, None, r"differently from training with CLIPTextModelWithProjection"),
        ({**OF_TEXT, "text": T5}, None, r"differently from training with T5EncoderModel"),
        ({**OF_TEXT, "backbone": of(SANA)}, None, r"SanaTransformer2DModel is exported into a copy of the pipeline"),
    ],
)  # fmt: skip
def test_what_no_pipeline_can_hold_is_refused_with_the_reason(
    arguments: dict[str, Any], change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = made(**arguments)
    if change is not None:
        change(module)
    refuse(written(module, tmp_path / "run.ckpt"), capsys, message)


def test_a_layer_that_is_part_of_the_network_is_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fuses = TokenRouting(0.5, 0, 0, mode="sprint")
    refuse(
        trained(tmp_path / "run.ckpt", made(**V, backbone=replace(DIT, depth=2)), fuses),
        capsys,
        r"blocks\.1\.token_fusion \(TokenFusion\) is part",
    )


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        ({"sampler": Sampler(shift=2.0)}, r"'builtin' \(FlowMatchEulerDiscreteScheduler\) .* DPMSolverMultistepSch"),
        ({"sampler": "heun"}, r"'heun' \(FlowMatchHeunDiscreteScheduler\) is replaced by DPMSolverMultistepScheduler"),
        ({**V, "sampler": "euler"}, r"'euler' \(EulerDiscreteScheduler\) is replaced by DDIMScheduler"),
        ({"sampler": "dpmsolver++"}, None),
        ({**V, "sampler": "builtin", "guidance_scale": 1.0}, None),
    ],
)
def test_a_sampler_that_is_replaced_is_named(
    arguments: dict[str, Any], replaced: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(written(made(**arguments), tmp_path / "run.ckpt"), "out")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    noted = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("Note: ")]
    assert len(told) == len(noted) == (replaced is not None)
    for line in told + noted:
        assert re.search(f"{replaced}.* because DiTPipeline does not support it", line)


def test_arguments_are_checked_before_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(made(**V), tmp_path / "run.ckpt")
    refuse(path, capsys, r"lora=diffusers is for checkpoints of LoRA", "--lora", "diffusers")
    refuse(tmp_path / "none.ckpt", capsys, r"there is no file")
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {}}, other)
    refuse(other, capsys, r"format diffusers is for checkpoints of LatentDiffusion, and .*other.ckpt is another one")
    assert export([str(path), "--output", str(tmp_path / "new"), "--lora", "merged"]) == 2
    assert "--lora does not belong to --format safetensors" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert export([str(path), "--format", "diffusers", "--output", str(tmp_path / "full")]) == 2
    assert "new or empty folder" in capsys.readouterr().err

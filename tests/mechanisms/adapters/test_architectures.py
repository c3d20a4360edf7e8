"""LoRA on real architectures made small: the base stays bit for bit, only adapters train, merged equals unmerged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import DiT, DiTConfig, DiTVariant, LoRA, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from tests.timm_models import import_timm

IDS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
LATENTS = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
TIMES = torch.tensor([1, 2])
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip


def _language(name: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**(sizes or SIZES))
        return getattr(transformers, f"{name}{head}")(config)

    return make


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return _language("GPT2", "LMHeadModel", **sizes, bos_token_id=None, eos_token_id=None)()


def _bert() -> nn.Module:
    own = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    return _language("Bert", "ForMaskedLM", **own)()


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def _own_dit() -> nn.Module:
    config = DiTConfig(width=16, depth=2, heads=2, context_width=8, variant=DiTVariant("rope", qk_norm=True))
    model = DiT(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip


def _vit() -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return import_timm().create_model("vit_tiny_patch16_224", num_classes=5, **sizes)


def _resnet() -> nn.Module:
    return import_timm().create_model("resnet10t", num_classes=5)


def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def _unet_output(model: Any) -> torch.Tensor:
    return model(LATENTS, TIMES, torch.ones(2, 3, 8)).sample


def _sd3_output(model: Any) -> torch.Tensor:
    return model(LATENTS, torch.ones(2, 3, 16), torch.ones(2, 16), TIMES).sample


def _images(model: Any) -> torch.Tensor:
    return model(LATENTS[:, :3].repeat(1, 1, 2, 2))


CONVOLUTIONS = ["to_q", "to_v", r"to_out\.0", "conv1", "conv_shortcut", "proj_in", "time_emb_proj"]
# How to build the model, its output, LoRA's arguments, and how many layers they mean.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor], dict[str, Any], int]] = {
    "llama": (_language("Llama"), _logits, {}, 14),
    "qwen3": (_language("Qwen3"), _logits, {"variant": "dora"}, 14),
    "gpt2": (_gpt2, _logits, {"variant": "dora"}, 8),
    "gemma": (_language("Gemma"), _logits, {}, 14),
    "gemma_tied": (_language("Gemma"), _logits, {"targets": ["lm_head", "embed_tokens", "q_proj"]}, 4),
    "bert": (_bert, _logits, {"variant": "pissa"}, 13),
    "unet": (_unet, _unet_output, {"targets": CONVOLUTIONS, "variant": "dora"}, 49),
    "dit": (_dit, lambda m: m(LATENTS, TIMES, TIMES).sample, {}, 20),
    "own_dit": (_own_dit, lambda m: m(LATENTS, TIMES / 3, TIMES, torch.ones(2, 3, 8)), {}, 20),
    "sd3": (_sd3, _sd3_output, {}, 32),
    "vit": (_vit, _images, {"variant": "rslora"}, 9),
    "resnet": (_resnet, _images, {"targets": ["conv2", "fc", r"conv1\.0"]}, 6),
}


def _train(model: Any, output: Callable[[Any], torch.Tensor], steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        y = output(model)
        (y.square().mean() - y.mean()).backward()
        optimizer.step()


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", MODELS)
def test_trains_adapters_alone_and_merges(name: str) -> None:
    make, output, arguments, layers = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)  # torch.matmul folds its input, or not, by what needs a gradient
    base = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = output(model).detach()
    report = apply(model, [LoRA(rank=2, **arguments)])["LoRA"]
    assert len(report.modules) == layers
    assert torch.equal(output(model), before)
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(key.rpartition(".")[2].startswith("lora_") for key in trained)
    _train(model, output)
    assert all(model.get_parameter(key).grad is not None for key in trained)
    after = model.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in base.items())
    model.load_state_dict(base)  # a base checkpoint loads beside the adapters, and into the merged model
    y = output(model).detach()
    if arguments.get("variant") not in ("dora", "pissa"):  # those start anew from the weights that they are given
        assert not torch.allclose(y, before, atol=1e-3)
    merge_adapters(model)
    torch.testing.assert_close(output(model).detach(), y, rtol=1e-5, atol=1e-5)
    assert model.state_dict().keys() == base.keys()
    model.load_state_dict(base)


@pytest.mark.turns(3)
@pytest.mark.parametrize("format", ["nf4", "int8", "int4"])
def test_a_quantised_conv1d_keeps_names_and_merges_back_into_one(format: str) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model: Any = _gpt2().eval()
    base = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    variant = "qalora" if format == "int4" else "lora"
    reports = apply(model, [QuantizeBase(format, group_size=16), LoRA(rank=2, variant=variant)])
    assert len(reports["QuantizeBase"].modules) == len(reports["LoRA"].modules) == 8
    assert base.keys() <= model.state_dict().keys()
    _train(model, _logits)
    weight = {"nf4": 0.12, "int8": 0.004, "int4": 0.05}[format]
    y = _logits(model).detach()
    again: Any = _gpt2().eval()
    again.load_state_dict(base)
    torch.testing.assert_close(_dequantised(model), again.transformer.h[0].mlp.c_fc.weight.T, rtol=0, atol=weight)
    model.load_state_dict(base)  # floats in [in, out], quantised on the way: what it holds already
    torch.testing.assert_close(_logits(model).detach(), y, rtol=0, atol=1e-6)
    merge_adapters(model)
    if format != "int4":
        assert type(model.transformer.h[0].attn.c_attn) is Conv1D
        assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in base.items()}
    torch.testing.assert_close(_logits(model).detach(), y, rtol=1e-5, atol=2e-2 if format == "int8" else 1e-5)


def _dequantised(model: Any) -> torch.Tensor:
    from lit_efficient.mechanisms.adapters.quantized import dequantize

    return dequantize(model.transformer.h[0].mlp.c_fc)


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8", "int4"])
def test_a_merged_weight_is_the_dequantised_base_plus_the_adapter(format: str) -> None:
    """Tight for int8, too, whose forward pass also rounds the activations."""
    from lit_efficient.mechanisms.adapters.quantized import dequantize

    torch.manual_seed(0)
    root: Any = nn.Sequential(nn.Linear(32, 16))
    apply(root, [QuantizeBase(format), LoRA(rank=2, alpha=4.0)])
    nn.init.normal_(root[0].lora_B)
    expected = dequantize(root[0]).double() + 2.0 * root[0].lora_B.double() @ root[0].lora_A.double()
    merge_adapters(root)
    torch.testing.assert_close(root[0].weight.double(), expected, rtol=1e-6, atol=1e-6)

"""GPT-OSS's files in MXFP4: read as the floats that the format means, trained, exported; or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GptOssConfig, GptOssForCausalLM

from lit_efficient import CausalLMConfig, ConfigurationError, LanguageModeling, LoRA, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models.libraries.causal_lm import build, format_advice
from tests.models.libraries.small_families import small_network
from tests.support import QUIET, assert_equal
from tests.support_cli import export

STACKED = ("gate_up_proj", "down_proj")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def floats(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of experts, as inputs x outputs: 32 codes of sign, two bits of exponent and one of mantissa
    share an exponent, and the low half of a byte comes first.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # (experts, outputs, groups, 32)
    values = FP4[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return in_mxfp4(small_network("gpt_oss"), tmp_path)


def in_mxfp4(network: Any, tmp_path: Path) -> Path:
    """A folder as that of openai/gpt-oss-20b: blocks and scales instead of the experts' weights."""
    network = network.to(torch.bfloat16)
    network.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    draw = torch.Generator().manual_seed(1)
    state = {}
    for name, tensor in load_file(path).items():
        if name.endswith(STACKED):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            state[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=draw)
        else:
            state[name] = tensor
    save_file(state, path, {"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return tmp_path / "base"


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_weights_are_the_floats_that_the_blocks_mean(folder: Path, dtype: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    spec = CausalLMConfig(str(folder), dtype=dtype)
    network = build(spec)
    read = 0
    for name, parameter in network.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if name.endswith(STACKED):
            expected = floats(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(parameter.float(), expected), name
            read += 1
        elif name in stored:
            assert torch.equal(parameter, stored[name]), name
    assert read == 2 * network.config.num_hidden_layers
    said = format_advice(spec)
    assert said is not None
    assert "MXFP4 (0.53 bytes per weight), which has no backward pass: they are dequantised to bfloat16" in said


def test_experts_become_other_codes_one_stack_at_a_time(tmp_path: Path) -> None:
    """The peak is the result and what the conversion of one stack takes: 6 bytes a weight."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 97, "num_local_experts": 8}
    place = in_mxfp4(GptOssForCausalLM(GptOssConfig(**sizes, num_experts_per_tok=2)), tmp_path)
    spec, technique = CausalLMConfig(str(place), dtype="auto"), QuantizeBase(experts=True)
    with AllocationMeter() as meter:
        network = build(spec, None, technique.on_read(""))
    stack = 8 * 64 * 128  # weights of gate_up_proj; down_proj has half as many
    assert meter.peak - meter.live < 8 * stack
    assert meter.peak < 0.6 * 12 * 1.5 * stack * 2  # bytes of all experts in bfloat16
    late: Any = build(spec)
    assert technique.transform(network).summary == QuantizeBase(experts=True).transform(late).summary
    assert_equal(network.state_dict(), late.state_dict())


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_second_quantisation_is_refused(folder: Path, quantize: Any) -> None:
    with pytest.raises(ConfigurationError, match="quantize must be null for files in MXFP4"):
        build(CausalLMConfig(str(folder), quantize=quantize))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("quantised", ["nothing", "attention", "experts"])
def test_adapters_train_and_their_exports_are_loaded(folder: Path, quantised: str, tmp_path: Path) -> None:
    """With attention and experts in nf4, too, which a merged model holds dequantised."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    task = LanguageModeling(CausalLMConfig(str(folder), dtype="auto"), learning_rate=0.02, warmup_steps=0)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    base = QuantizeBase(experts=quantised == "experts")
    targets = "all-linear+experts" if base.experts else "all-linear"
    techniques = [base] * (quantised != "nothing") + [LoRA(rank=2, targets=targets)]
    trainer = L.Trainer(callbacks=techniques, **QUIET, max_steps=3)
    trainer.fit(task, DataLoader(rows, 2), DataLoader(rows, 2))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    expected = logits(task.network)
    before = logits(build(CausalLMConfig(str(folder), dtype="auto")))
    assert (expected - before).abs().max() > 0.05
    command = [str(tmp_path / "a.ckpt"), "--no-check", "--format"]
    assert export([*command, "merged", "--output", str(tmp_path / "merged")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close_but_for_a_token(logits(merged), expected)
    if quantised != "attention":
        assert export([*command, "peft", "--output", str(tmp_path / "peft")]) == 0
        dense: Any = AutoModelForCausalLM.from_pretrained(folder)
        if base.experts:
            apply(dense, [base])
            dense = dequantize_layers(dense, torch.bfloat16)
        adapted = PeftModel.from_pretrained(dense, tmp_path / "peft", autocast_adapter_dtype=False)
        assert_close_but_for_a_token(logits(adapted), expected)


def assert_close_but_for_a_token(found: Tensor, expected: Tensor) -> None:
    """Compare logits in bfloat16: by its rounding, the router may choose another expert for a token."""
    errors = (found - expected).abs().amax(dim=-1)
    assert (errors > 0.04 * float(expected.abs().max())).sum() <= 1


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()

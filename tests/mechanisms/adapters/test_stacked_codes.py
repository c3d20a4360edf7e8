"""Experts in 4 bits: the numbers of their dequantised codes, which neither a layer at rest nor autograd stores."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import (
    ActivationCheckpointing,
    ActivationOffload,
    CausalLMConfig,
    ConfigurationError,
    ExpertsBackend,
    LoRA,
    LossFreeBalancing,
    PeftAdapter,
    QuantizeBase,
    merge_adapters,
)
from lit_efficient.__main__ import main
from lit_efficient.application import apply
from lit_efficient.errors import CheckpointError
from lit_efficient.mechanisms.adapters import stacked_codes
from lit_efficient.mechanisms.adapters.base import check, trim
from lit_efficient.mechanisms.adapters.bitsandbytes_layers import Stack4bit
from lit_efficient.mechanisms.adapters.disabled import disabled, has_adapters
from lit_efficient.mechanisms.adapters.merge import dequantize_layers, whole_state, without_adapters
from lit_efficient.mechanisms.adapters.quantized import stored_bytes
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from tests.callbacks.test_experts_backend import IDS, decoder
from tests.callbacks.test_quantize_base import Holder, base
from tests.support import assert_equal, weights

WAYS = ("grouped_mm", "eager", "batched_mm")
FAMILIES = ("Mixtral", "Qwen3Moe", "GptOss")
LARGE = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8, "num_hidden_layers": 4}
EXPERTS = 4 * 8 * 3 * 64 * 96  # weights of the experts of Mixtral in these sizes


def adapted(network: nn.Module, *techniques: Any) -> Any:
    """Return a network with random adapters, which are equal for equal sizes."""
    apply(network, [LoRA(rank=2, targets="all-linear+experts"), *techniques])
    for name, p in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return network


def quantized(family: str, way: str = "grouped_mm", *techniques: Any, **sizes: Any) -> Any:
    network = decoder(family, **sizes)
    network.set_experts_implementation(way)
    apply(network, [QuantizeBase(experts=True), *techniques])
    return network


def gradients(network: nn.Module) -> dict[str, Any]:
    network.zero_grad()
    network(IDS).logits.square().sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.requires_grad}


@pytest.mark.turns(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_dequantised_codes(family: str, way: str) -> None:
    network = quantized(family, way)
    assert not has_adapters(network)
    dense = dequantize_layers(copy.deepcopy(network))
    float_base = decoder(family)
    assert dense.state_dict().keys() == float_base.state_dict().keys()
    assert_equal(without_adapters(network), whole_state(dense))
    key = "model.layers.0.mlp.experts.down_proj"
    error = (dense.get_parameter(key) - float_base.get_parameter(key)).abs().max()
    assert 0 < error < 0.16 * float_base.get_parameter(key).abs().max()  # the table's widest step
    plain = network(IDS).logits
    ours, theirs = adapted(network), adapted(dense)
    assert_equal(gradients(ours), gradients(theirs))
    wanted = theirs(IDS).logits
    assert torch.equal(ours(IDS).logits, wanted)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    with disabled(ours):
        assert torch.equal(ours(IDS).logits, plain)
    merged = merge_adapters(copy.deepcopy(ours))
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-5, atol=1e-6)
    assert list(merged.state_dict()) == list(float_base.state_dict())
    merged = merge_adapters(ours, dtype=torch.bfloat16)
    assert merged.get_parameter(key).dtype == torch.bfloat16


def test_one_stack_may_stay_in_floats() -> None:
    network = decoder("Mixtral")
    report = apply(network, [QuantizeBase(skip=("lm_head", r"experts\.down_proj"), experts=True)])["QuantizeBase"]
    experts: Any = network.get_submodule("model.layers.0.mlp.experts")
    assert "8 linear layers and 2 stacks of experts in nf4" in report.summary
    assert report.modules is not None
    assert "model.layers.1.mlp.experts.gate_up_proj" in report.modules
    assert report.details["bytes_of_experts"] == 2 * experts.down_proj.nbytes
    dense = adapted(dequantize_layers(copy.deepcopy(network)))
    assert_equal(gradients(adapted(network)), gradients(dense))
    wanted = dense(IDS).logits
    torch.testing.assert_close(merge_adapters(network)(IDS).logits, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("double", [True, False])
def test_a_weight_takes_half_a_byte_and_its_constants(double: bool) -> None:
    network = decoder("Mixtral", **LARGE)
    report = apply(network, [QuantizeBase(experts=True, double_quant=double)])["QuantizeBase"]
    stacks = [part for part in network.modules() if isinstance(part, Stack4bit)]
    assert sum(part.shape.numel() for part in stacks) == EXPERTS
    constants = 1 / 64 + 4 / 64 / 256 if double else 4 / 64  # bytes a weight
    tables = 8 * (64 + (1024 + 4 if double else 0))
    assert sum(map(stored_bytes, stacks)) == pytest.approx(EXPERTS * (0.5 + constants) + tables, rel=1e-3)
    floats = sum(p.nbytes for p in network.parameters() if p.is_floating_point())
    assert report.bytes_saved is not None
    assert floats + 4 * report.parameters - report.bytes_saved < 0.35 * 4 * EXPERTS


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
def test_autograd_stores_no_weight_and_dequantises_each_stack_once_a_pass(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = adapted(quantized("Mixtral", way, **LARGE))
    dense = adapted(dequantize_layers(quantized("Mixtral", way, **LARGE)))
    live = []
    for one in (dense, network):
        one(IDS)  # allocates what is kept for later calls
        with AllocationMeter() as meter:
            output = one(IDS).logits
            live.append(meter.live)
        del output
    assert live[0] > 4 * EXPERTS
    assert live[1] < 0.25 * 4 * EXPERTS
    assert live[0] - live[1] == pytest.approx(4 * EXPERTS, rel=0.1)
    calls: list[Any] = []
    theirs = stacked_codes.dequantize
    monkeypatch.setattr(stacked_codes, "dequantize", lambda layer: (calls.append(layer), theirs(layer))[1])
    output = network(IDS).logits.sum()
    assert len(calls) == 8
    output.backward(retain_graph=True)
    assert len(calls) == 16
    first = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    output.backward()  # of the same graph
    assert_equal({name: 2 * grad for name, grad in first.items()}, {n: network.get_parameter(n).grad for n in first})


@pytest.mark.turns(2)
@pytest.mark.parametrize("technique", [ActivationCheckpointing, ActivationOffload, ExpertsBackend, LossFreeBalancing])
def test_other_techniques_see_the_tensors_that_they_saw(technique: Any) -> None:
    fields = {"min_bytes": 1} if technique is ActivationOffload else {}
    network = decoder("Qwen3Moe", **LARGE)
    apply(network, [QuantizeBase(experts=True), *([technique()] if technique is LossFreeBalancing else [])])
    dense = dequantize_layers(copy.deepcopy(network))
    own = [] if technique is LossFreeBalancing else [lambda: technique(**fields)]
    ours, theirs = (adapted(one, *(make() for make in own)).train() for one in (network, dense))
    assert_equal(gradients(ours), gradients(theirs))
    saved: list[int] = []
    for one in (ours, theirs):
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}), t)[1],  # noqa: B023
            lambda t: t,
        ):
            one(IDS)
        saved.append(sum(kept.values()))
    assert saved[0] <= saved[1]


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.turns(2))])
def test_codes_and_float_weights_of_checkpoints_load(family: str) -> None:
    fresh = quantized(family)
    other = decoder(family)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    floats = weights(other)
    apply(other, [QuantizeBase(experts=True)])
    wanted = other(IDS).logits
    assert not torch.equal(fresh(IDS).logits, wanted)
    for state in (floats, other.state_dict()):
        network = copy.deepcopy(fresh)
        network.load_state_dict(state)
        assert torch.equal(network(IDS).logits, wanted)
        assert_equal(weights(network), weights(other))
        network.load_state_dict(fresh.state_dict())
        assert torch.equal(network(IDS).logits, fresh(IDS).logits)


def test_adapters_trained_beside_codes_need_the_codes() -> None:
    """Linear layers are equal in both networks. The name of a stack differs."""
    floats = decoder("Mixtral", **LARGE)
    apply(floats, [QuantizeBase()])
    networks = [adapted(quantized("Mixtral", **LARGE)), adapted(floats)]
    checkpoints: list[dict[str, Any]] = []
    for network in networks:
        checkpoints.append({"state_dict": network.state_dict(), "lit_efficient": {}})
        trim(network, checkpoints[-1])
        check(network, checkpoints[-1])
    for network, checkpoint in zip(networks, reversed(checkpoints), strict=True):
        with pytest.raises(CheckpointError, match=r"8 of \d+ frozen tensors differ"):
            check(network, checkpoint)


def test_under_bf16_true_and_autocast_weights_are_computed_in_that_format() -> None:
    network = adapted(quantized("Mixtral"))
    wanted = network(IDS).logits
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(IDS).logits
    network.to(torch.bfloat16)
    network.get_submodule("model.layers.0.mlp.experts").register_forward_hook(lambda *given: seen.append(given[2]))
    seen: list[torch.Tensor] = []
    narrow = network(IDS).logits
    assert seen[0].dtype == torch.bfloat16
    for one in (mixed, narrow):
        assert (one.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
    narrow.float().square().sum().backward()
    assert all(p.grad is not None for name, p in network.named_parameters() if "lora_" in name)


@pytest.mark.turns(2)
@pytest.mark.parametrize("double", [True, False])
def test_experts_are_quantised_while_files_are_read(double: bool, tmp_path: Path) -> None:
    spec = CausalLMConfig(base("mixtral", tmp_path))
    how: Any = {"double_quant": double, "experts": True}
    late, early = Holder(None, spec), Holder(technique := QuantizeBase(**how), spec)
    assert any(isinstance(part, Stack4bit) for part in early.modules())
    assert QuantizeBase(**how).transform(late) == technique.transform(early)
    theirs, ours = late.state_dict(), early.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    ids = torch.arange(6)[None]
    assert torch.equal(late.network(ids).logits, early.network(ids).logits)


def test_what_cannot_be_quantised_is_refused() -> None:
    for format in ("int8", "int4"):
        with pytest.raises(ConfigurationError, match=rf"experts must be false for format {format}; nf4 and fp4 quan"):
            QuantizeBase(format, experts=True)
    with pytest.raises(ConfigurationError, match=r"experts=True finds no stacked weights of experts in Linear"):
        apply(nn.Linear(2, 2), [QuantizeBase(experts=True)])
    network = quantized("Mixtral")
    with pytest.raises(ConfigurationError, match=r"already quantised: 12 layers, first 'model"):
        QuantizeBase(experts=True).transform(network)
    with pytest.raises(ConfigurationError, match="support the variants lora and rslora without dropout, got"):
        apply(network, [LoRA(targets="all-linear+experts", dropout=0.1)])
    peft = {"peft_type": "LORA", "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    with pytest.raises(ConfigurationError, match=r"target_parameters=.* were set but no parameter was matched"):
        apply(quantized("Mixtral"), [PeftAdapter(peft)])
    with torch.device("meta"):
        empty = decoder("Mixtral")
    with pytest.raises(ConfigurationError, match=r"weights are on the meta device\. Load the base's weights first"):
        apply(empty, [QuantizeBase(experts=True, skip=("(q|k|v|o)_proj", "lm_head"))])


CONFIG = """
seed_everything: 0
trainer:
  max_steps: 4
  accelerator: cpu
  logger: false
  enable_model_summary: false
  limit_val_batches: 0
  default_root_dir: run
  callbacks:
    - class_path: ExactResume
    - class_path: QuantizeBase
      init_args: {experts: true}
    - class_path: LoRA
      init_args: {rank: 2, targets: all-linear+experts, save_base: SAVE}
    - class_path: ModelCheckpoint
      init_args: {filename: "{step}", every_n_train_steps: 2, save_top_k: -1, dirpath: checkpoints}
model:
  class_path: LanguageModeling
  init_args: {model: {name_or_path: BASE}, learning_rate: 0.05, warmup_steps: 0}
data:
  class_path: LanguageData
  init_args: {train: rows.jsonl, tokenizer: BASE, max_length: 16, batch_size: 2, num_workers: 0}
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", ["false", pytest.param("true", marks=pytest.mark.turns(3))])
def test_a_folder_is_trained_resumed_exported_and_loaded(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line, from a folder of Qwen3-MoE to folders that transformers and peft load."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.tasks.text_kit import sentence, tokenizer

    monkeypatch.chdir(tmp_path)
    words = tokenizer("qwen3")
    decoder("Qwen3Moe", vocab_size=len(words), max_position_embeddings=32).save_pretrained("base")
    words.save_pretrained("base")
    rows = [json.dumps({"text": sentence(n, 8)}) for n in range(16)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    Path("here.yaml").write_text(CONFIG.replace("BASE", "base").replace("SAVE", save))
    assert main(["fit", "-c", "here.yaml"]) == 0
    [half] = Path("checkpoints").glob("*step=2.ckpt")
    [whole] = Path("checkpoints").glob("*step=4.ckpt")
    state = torch.load(whole, weights_only=True)["state_dict"]
    assert any(".experts.lora_B_down_proj" in name and tensor.any() for name, tensor in state.items())
    assert any(name.endswith("experts.down_proj.weight") for name in state) is (save == "true")
    whole.rename("whole.ckpt")
    assert main(["fit", "-c", "here.yaml", "--ckpt_path", str(half)]) == 0
    assert_equal(state, torch.load(whole, weights_only=True)["state_dict"])
    for format, *more in (("merged", "--no-check"), ("peft",)):
        assert main(["export", "whole.ckpt", "--format", format, "--output", format, *more]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained("merged")
    ours = quantized("Qwen3Moe", vocab_size=len(words), max_position_embeddings=32)
    dense: Any = AutoModelForCausalLM.from_pretrained("base")
    dense.load_state_dict(dequantize_layers(copy.deepcopy(ours)).state_dict())
    apply(started := copy.deepcopy(ours), [LoRA(start_from="peft")])
    apply(ours, [LoRA(rank=2, targets="all-linear+experts")])
    adapters = {name.removeprefix("network."): tensor for name, tensor in state.items() if "lora_" in name}
    ours.load_state_dict(adapters)
    with torch.no_grad():
        wanted = ours.eval()(IDS).logits
        assert torch.equal(started.eval()(IDS).logits, wanted)
        torch.testing.assert_close(merged.eval()(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            PeftModel.from_pretrained(dense, "peft").eval()(IDS).logits, wanted, rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained("base")(IDS).logits, wanted, atol=1e-2)

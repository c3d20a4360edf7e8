"""The balancing loss of routers: transformers' own, on by default, whatever the rows look like."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ConfigurationError,
    GPTConfig,
    KeepFloat32,
    LanguageModeling,
    MixtureOfExperts,
    apply,
)
from lit_efficient.internals.hugging_face import causal_model_of, from_config
from lit_efficient.mechanisms.router_balance import RouterBalance, routers
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.surgery import expert_stacks
from tests.models.libraries.test_causal_lm import SMALL
from tests.tasks.test_language_modeling_of_hugging_face import _corpus, _trainer

# What the families call their sizes; each takes those that its configuration has.
FIELDS = SMALL | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
FIELDS |= dict.fromkeys(("num_experts_per_tok", "moe_k"), 2)
FIELDS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
FIELDS |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "decoder_sparse_step", "expert_layer_period"), 1)
FIELDS |= dict.fromkeys(("first_k_dense_replace", "expert_layer_offset", "moe_layer_start_index"), 0)
FIELDS |= {"num_dense_layers": 0, "max_position_embeddings": 64, "kv_lora_rank": 8, "q_lora_rank": 8}
FIELDS |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FURTHER: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "deepseek_v4": {"num_hidden_layers": 6},  # whose first layers are dense, or choose experts by a hash
    "flint": {"num_hidden_layers": 6},
    "dbrx": {
        "d_model": SMALL["hidden_size"], "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": SMALL["hidden_size"], "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "num_key_value_heads": SMALL["num_attention_heads"], "shared_experts_intermediate_size": 16, "index_n_heads": 2,
        "mlp_layer_types": ["sparse"] * 2, "layer_types": ["sliding_attention"] * 2, "head_dim": 8, "index_head_dim": 8,
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "layer_types": ["sliding_attention"] * 2,
        "vocab_size_per_layer_input": SMALL["vocab_size"], "hidden_size_per_layer_input": 8,
    },
    "llama4_text": {"intermediate_size_mlp": 32},
    "qwen3_5_moe_text": {"layer_types": ["full_attention"] * 2, "num_experts": 4},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention"] * 2, "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
    },
}  # fmt: skip
# Configurations around that of a text model, without experts by default, and Doge, whose experts in transformers let
# tokens see later ones, which is refused.
PASSED_OVER = {"doge", "bamba", "gemma4", "dots3_note", "llama4", "qwen3_5_moe", "qwen4_exp"}
USUAL = ("mixtral", "qwen3_moe", "gpt_oss", "jetmoe")
BALANCED_BY_A_BIAS = ("glm4_moe", "afmoe", "deepseek_v3")


def fields_of(kind: str) -> dict[str, Any]:
    default = CONFIG_MAPPING[kind]()
    known = {*vars(default), *type(default).attribute_map}
    return {name: value for name, value in FIELDS.items() if name in known} | FURTHER.get(kind, {})


def network_of(kind: str, **more: Any) -> Any:
    config = CONFIG_MAPPING[kind](**fields_of(kind) | more)
    torch.manual_seed(0)
    return from_config(causal_model_of(config), config)


def task_of(network: Any, **fields: Any) -> LanguageModeling:
    task = LanguageModeling(CausalLMConfig(config_fields={"model_type": network.config.model_type, **fields}))
    task.network = network
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    return task


def families() -> Iterator[str]:
    """Causal language models whose code mentions experts."""
    for kind in sorted(CONFIG_MAPPING):
        model = AutoModelForCausalLM._model_mapping.get(CONFIG_MAPPING[kind], None)
        if model is not None and "xperts" in inspect.getsource(sys.modules[model.__module__]):
            yield kind


def rows() -> dict[str, Tensor]:
    """Two documents of 7 and 5 tokens, a row each."""
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    ids[1, 5:] = 2
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed() -> dict[str, Tensor]:
    """The same documents in one row, with 4 tokens of padding."""
    given = rows()
    ids = torch.cat((given["input_ids"][0], given["input_ids"][1, :5], torch.full((4,), 2)))[None]
    labels = torch.cat((given["labels"][0], given["labels"][1, :5], torch.full((4,), -100)))[None]
    positions = torch.cat([torch.arange(length) for length in (7, 5, 4)])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def assert_is_theirs(network: Any, packs: bool = True) -> None:
    """The loss is that of the network itself, with ``output_router_logits``, for padded rows and for packed ones."""
    network.eval()
    theirs = network(**rows(), use_cache=False, output_router_logits=True)
    for batch in (rows(), packed()) if packs else (rows(),):
        ours = task_of(network).training_step(batch, 0)
        torch.testing.assert_close(ours["loss"], theirs.loss, rtol=1e-5, atol=1e-5)
        coefficient = (ours["extra_loss"] / theirs.aux_loss).item()
        assert 0 < coefficient <= 0.1
        torch.testing.assert_close(ours["loss"] - ours["extra_loss"], theirs.loss - coefficient * theirs.aux_loss)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("kind", USUAL)
def test_the_balancing_loss_is_on_by_default_and_the_networks_own(kind: str) -> None:
    network = network_of(kind)
    assert not network.config.output_router_logits
    assert_is_theirs(network)
    with torch.no_grad():  # a validation has no use for it
        assert "extra_loss" not in task_of(network).training_step(packed(), 0)


@pytest.mark.nightly
def test_every_family_balances_its_experts_or_says_why_not() -> None:
    balanced, explained = set(), set()
    for kind in families():
        if kind in PASSED_OVER:
            continue
        network = network_of(kind)
        balance = RouterBalance("Task", network)
        if balance.is_on:
            task = task_of(network.eval())
            try:
                task.training_step(packed(), 0)
                packs = True
            except ConfigurationError:  # it does not isolate the documents of a row
                packs = False
            assert_is_theirs(network, packs)
            balanced.add(kind)
        elif balance.message is not None:
            explained.add(kind)
        else:
            assert not any(True for _ in routers(network))
    assert len(balanced) >= 25
    assert len(explained) >= 29


def test_packed_rows_count_no_padding_and_every_document() -> None:
    """The starts of documents are the attention mask there: as weights they would leave out the first document."""
    network = network_of("mixtral")
    whole = network(input_ids=packed()["input_ids"], use_cache=False, output_router_logits=True)
    ours = task_of(network.eval()).training_step(packed(), 0)["extra_loss"]
    assert (ours - 0.001 * whole.aux_loss).abs() > 1e-7


@pytest.mark.parametrize("technique", [ChunkedCrossEntropy(chunk_size=3), KeepFloat32()])
def test_techniques_that_change_the_networks_class_keep_it(technique: Any) -> None:
    network = network_of("qwen3_moe").eval()
    theirs = network(**rows(), use_cache=False, output_router_logits=True)
    task = task_of(network)
    apply(task, technique)
    torch.testing.assert_close(task.training_step(packed(), 0)["loss"], theirs.loss)


def test_it_moves_the_routers() -> None:
    grads = []
    for wanted in (None, False):
        network = network_of("mixtral").eval()
        fields = {} if wanted is None else {"output_router_logits": wanted}
        task_of(network, **fields).training_step(rows(), 0)["loss"].backward()
        grads.append(network.model.layers[0].mlp.gate.weight.grad)
    assert not torch.allclose(grads[0], grads[1])


@pytest.mark.parametrize("kind", BALANCED_BY_A_BIAS)
def test_asking_for_a_loss_that_does_not_exist_is_an_error(kind: str) -> None:
    fields = fields_of(kind) | {"model_type": kind, "output_router_logits": True}
    task = LanguageModeling(CausalLMConfig(config_fields=fields))
    with pytest.raises(ConfigurationError, match=r"output_router_logits: true has no effect for .*computes none"):
        task.configure_model()


def test_a_network_of_dense_layers_has_nothing_to_balance() -> None:
    """The class has the loss, and it would fail without a router."""
    network = network_of("qwen3_moe", mlp_only_layers=[0, 1])
    assert "extra_loss" not in task_of(network).training_step(rows(), 0)


def test_a_fit_says_that_nothing_balances_the_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {name: value for name, value in fields_of("glm4_moe").items() if name != "vocab_size"}
    task = LanguageModeling(CausalLMConfig(config_fields={"model_type": "glm4_moe", **fields}))
    with caplog.at_level(logging.INFO):
        _trainer(tmp_path, max_steps=1).fit(task, _corpus(tmp_path))
    assert "Glm4MoeForCausalLM trains its routers without a balancing loss" in caplog.text


def test_routers_are_found_during_a_functional_call() -> None:
    """Where parameters are plain tensors, as in the reference of a task without adapters."""
    network = GPT(GPTConfig(64, dim=32, depth=2, num_heads=2, max_length=16))
    apply(network, MixtureOfExperts())
    assert expert_stacks(network)
    expected = [[name for name, _ in routers(network)]]
    found: list[list[str]] = []
    network.register_forward_pre_hook(lambda *_: found.append([name for name, _ in routers(network)]))
    functional_call(network, dict(network.named_parameters()), torch.tensor([[1, 2]]))
    assert found == expected

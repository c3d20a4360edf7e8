"""ExpertsBackend: the numbers and gradients of transformers' loop over experts, or a refusal before the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lit_efficient import ConfigurationError, ExpertsBackend, LoRA
from lit_efficient.application import apply
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.mechanisms.adapters.test_experts import IDS, SMALL
from tests.support import Net

SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
FIELDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 3},
    "DeepseekV3": {
        "num_key_value_heads": 2, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip


def decoder(family: str, **fields: Any) -> Any:
    """Return a small language model of a family with experts, with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FIELDS[family] | fields)
    network = getattr(transformers, f"{family}ForCausalLM")(config)
    for p in network.parameters():
        nn.init.normal_(p, std=0.2)
    return network


def experts_are_computed_as_named(run: Run) -> None:
    """The network of transformers in the toy uses the named implementation."""
    assert run.module.net.mixture.config._experts_implementation == "batched_mm"
    assert run.reports["ExpertsBackend"].modules == ("net.mixture.mlp.experts",)


ROW = Row(
    lambda: ExpertsBackend("batched_mm"),
    experts_are_computed_as_named,
    lambda: ExpertsBackend("grouped_mm"),  # what transformers chooses itself
    experts=True,
)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_each_backend_gives_the_numbers_and_gradients_of_the_loop(family: str) -> None:
    loop = decoder(family)
    loop.set_experts_implementation("eager")
    wanted = loop(IDS).logits
    wanted.square().sum().backward()
    for backend in ("grouped_mm", "batched_mm"):
        network = copy.deepcopy(loop)
        network.zero_grad()
        report = apply(network, [ExpertsBackend(backend)])["ExpertsBackend"]
        assert report.summary == f"2 modules of experts ({family}Experts) use {backend}, was eager"
        given = network(IDS).logits
        torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)
        given.square().sum().backward()
        for (name, p), own in zip(network.named_parameters(), loop.parameters(), strict=True):
            torch.testing.assert_close(p.grad, own.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_what_has_no_choice_and_what_the_product_cannot_multiply_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"backend must be one of.*got 'fused'"):
        ExpertsBackend("fused")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Net has no experts for which transformers offers a choice"):
        apply(Net(), [ExpertsBackend()])
    odd = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL | {"intermediate_size": 22}))
    with pytest.raises(ConfigurationError, match=r"gate_up_proj' has matrices of 44 x 16|down_proj' has matrices of"):
        apply(odd, [ExpertsBackend()])
    apply(odd, [ExpertsBackend("eager")])
    assert odd(IDS).logits.isfinite().all()
    with pytest.raises(ConfigurationError, match=r"needs rows of a multiple of 16 bytes, in float32.*torch\.float64"):
        apply(decoder("Mixtral").double(), [ExpertsBackend()])


def test_adapted_experts_are_grouped_too() -> None:
    network = decoder("GptOss")
    apply(network, [LoRA(rank=2, targets="all-linear+experts")])
    for name, p in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    wanted = network(IDS).logits
    apply(network, [ExpertsBackend("eager")])
    torch.testing.assert_close(network(IDS).logits, wanted, rtol=1e-5, atol=1e-5)

"""Adapters turned off: bit for bit the base, for every kind of adapter, and on again whatever happens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import GPT, IA3, CausalLMConfig, GPTConfig, LoRA, PrefixTuning, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.disabled import disabled, has_adapters
from lit_efficient.models.libraries.causal_lm import build
from tests.models.libraries.test_causal_lm import FAMILIES

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
TECHNIQUES: dict[str, Any] = {
    variant: lambda variant=variant: LoRA(rank=4, variant=variant) for variant in ("lora", "rslora", "dora", "pissa")
}
TECHNIQUES["embedding"] = LoRA
TECHNIQUES["ia3"] = IA3
TECHNIQUES["prefix"] = lambda: PrefixTuning(init_tokens=[5, 6, 7])


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(GPTConfig(97, dim=32, depth=2, num_heads=4, max_length=32))
    return build(CausalLMConfig(config_fields=FAMILIES[name])).eval()


def _logits(network: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output = network(IDS)
    return output if isinstance(output, torch.Tensor) else output.logits


def _disturbed(network: nn.Module, technique: Any) -> nn.Module:
    apply(network, [technique])
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return network


@pytest.mark.turns(3)
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt"])
def test_the_base_bit_for_bit(family: str, technique: str) -> None:
    network = _network(family)
    base = _logits(network)
    made = TECHNIQUES[technique]()
    if technique == "embedding":
        made = LoRA(rank=4, targets=[{"gpt2": "wte", "llama": "embed_tokens", "gpt": "embedding"}[family]])
    assert not has_adapters(network)
    _disturbed(network, made)
    assert has_adapters(network)
    trained = _logits(network)
    with disabled(network):
        assert torch.equal(_logits(network), base)
    assert torch.equal(_logits(network), trained)
    assert not torch.allclose(trained, base)


def test_nested_contexts_and_errors_leave_adapters_as_they_were() -> None:
    network = _disturbed(_network("llama"), LoRA(rank=4, dropout=0.5))
    trained = _logits(network)
    with disabled(network):
        with disabled(network):
            pass
        assert not torch.equal(_logits(network), trained)  # still off
    with pytest.raises(IndexError), disabled(network):
        network(torch.full((1, 3), 1000))  # no such token
    assert torch.equal(_logits(network), trained)
    with disabled(network):
        twin = copy.deepcopy(network)
    assert torch.equal(_logits(network), trained)
    assert not torch.equal(_logits(twin), trained)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("number_format", "variant"), [("int4", "qalora"), ("int4", "dora"), ("nf4", "pissa")])
def test_of_a_quantised_base_it_is_the_quantised_one(number_format: str, variant: str) -> None:
    options = {"group_size": 8} if number_format == "int4" else {}
    network = _network("llama")
    base = _network("llama")
    apply(base, [QuantizeBase(number_format, **options)])
    apply(network, [QuantizeBase(number_format, **options)])
    _disturbed(network, LoRA(rank=4, variant=variant))
    with disabled(network):
        assert torch.equal(_logits(network), _logits(base))
    assert not torch.allclose(_logits(network), _logits(base))

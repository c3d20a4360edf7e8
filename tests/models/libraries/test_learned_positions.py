"""Where a network's positions end, by running it up to there and one token further."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient import CausalLMConfig
from lit_efficient.models.libraries.causal_lm import build, learned_positions, positions_of

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**SMALL, "n_positions": 16},
    "gpt_neo": {**SMALL, "max_position_embeddings": 16, "num_layers": 1, "attention_types": [[["global"], 1]]},
    "gpt_bigcode": {**SMALL, "n_positions": 16},
    "opt": {**SMALL, "max_position_embeddings": 16, "word_embed_proj_dim": 16, "ffn_dim": 16},
    "biogpt": {**SMALL, "max_position_embeddings": 16, "intermediate_size": 16},
    "roberta": {**SMALL, "max_position_embeddings": 18, "intermediate_size": 16, "is_decoder": True},
    "llama": {**SMALL, "max_position_embeddings": 16, "intermediate_size": 16},
    "gpt_neox": {**SMALL, "max_position_embeddings": 16, "intermediate_size": 16},
    "bloom": {**SMALL},
}
ENDLESS = {"llama", "gpt_neox", "bloom"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_reads_so_many_tokens_and_no_more(family: str) -> None:
    spec = CausalLMConfig(config_fields={"model_type": family, **FAMILIES[family]})
    network = build(spec).eval()
    most = learned_positions(network)
    assert most == positions_of(spec) == (None if family in ENDLESS else 16)
    with torch.no_grad():
        network(torch.full((1, most or 24), 7))
        if most:
            with pytest.raises((IndexError, RuntimeError)):
                network(torch.full((1, most + 1), 7))

"""IA3: the right layers in each family, merging over float and quantised bases, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import IA3, ConfigurationError, QuantizeBase, merge_adapters
from lit_efficient.application import apply, reports_of
from tests.support import Toy

SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "vocab_size": 16, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 8}


def _model(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "GPT2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
        return transformers.GPT2LMHeadModel(config).eval()
    config = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


FAMILIES = {name: {"k_proj", "v_proj", "down_proj"} for name in ("Llama", "Mistral", "Qwen2", "Gemma")}
FAMILIES["GPT2"] = {"c_attn", "c_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_keys_values_and_feed_forward_in_each_family_and_merges(family: str) -> None:
    root = nn.ModuleDict({"model": _model(family)})
    ids = torch.arange(8)[None]
    before = root["model"](ids).logits
    apply(root, [IA3()])
    report = reports_of(root)["IA3"]
    assert {name.rpartition(".")[2] for name in report.modules} == FAMILIES[family]
    assert report.parameters == (16 + 32 if family == "GPT2" else 4 + 4 + 12)  # queries are left alone
    assert {name.rpartition(".")[2] for name, p in root.named_parameters() if p.requires_grad} == {"ia3"}
    assert torch.equal(root["model"](ids).logits, before)
    with torch.no_grad():
        for name, p in root.named_parameters():
            if name.endswith(".ia3"):
                p.uniform_(0.5, 2.0)
    y = root["model"](ids).logits
    assert not torch.allclose(y, before, atol=1e-4)
    merge_adapters(root)
    torch.testing.assert_close(root["model"](ids).logits, y, rtol=1e-5, atol=1e-5)
    assert root["model"].state_dict().keys() == _model(family).state_dict().keys()


def test_a_quantised_base_is_dequantised_when_it_is_merged() -> None:
    module, x = Toy(), torch.randn(3, 16)
    apply(module, [QuantizeBase(), IA3(targets=["up"], feedforward=["down"])])
    with torch.no_grad():
        module.net.blocks[0].up.ia3.uniform_(0.5, 2.0)
        module.net.blocks[0].down.ia3.uniform_(0.5, 2.0)
    y = module.net(x)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-5, atol=1e-5)
    assert module.state_dict().keys() == Toy().state_dict().keys()


def test_what_it_cannot_place_is_refused_with_what_could_match() -> None:
    with pytest.raises(ConfigurationError, match=r"no family that auto knows.*among: net.stem, net.blocks.0.up"):
        apply(Toy(), [IA3()])
    with pytest.raises(ConfigurationError, match="both be auto, or both be patterns"):
        IA3(targets=["up"])
    with pytest.raises(ConfigurationError, match="matched by targets and by feedforward"):
        apply(Toy(), [IA3(targets=["up"], feedforward=["up"])])
    with pytest.raises(ConfigurationError, match="IA3: targets: the pattern 'k' matches none"):
        apply(Toy(), [IA3(targets=["k"], feedforward=["down"])])

from pathlib import Path

import torch
from torch import nn

from lit_efficient.internals.hugging_face_loading import replacing_config
from tests.internals.leaning import leans_on


class Doubled:
    """Puts twice the weight in the place of each projection."""

    bytes_per_weight = 4.0

    def __init__(self) -> None:
        self.order: list[int] = []

    def chosen(self, network: nn.Module) -> set[str]:
        assert all(parameter.is_meta for parameter in network.parameters())
        return {f"{name}.weight" for name, part in network.named_modules() if type(part) is nn.Linear}

    def replaced(self, layer: nn.Module, key: str) -> nn.Module:
        assert key == "weight"
        self.order.append(layer.out_features)
        twin = nn.Linear(layer.in_features, layer.out_features, bias=False)
        twin.weight = nn.Parameter(2 * layer.weight, requires_grad=False)
        return twin


@leans_on("transformers", "param._is_hf_initialized, config._is_quantized", "hugging_face_loading")
def test_layers_are_replaced_as_they_are_read_and_stay_as_they_are_made(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=4, tie_word_embeddings=tied, **sizes))
        model.save_pretrained(tmp_path)
        doubled = Doubled()
        read = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=replacing_config(doubled))
        assert len(doubled.order) == 7 + (not tied)
        for (name, ours), theirs in zip(read.named_parameters(), model.parameters(), strict=True):
            kind = type(model.get_submodule(name.removesuffix(".weight")))
            is_linear = kind is nn.Linear and not (tied and "head" in name)
            torch.testing.assert_close(ours.detach(), theirs.detach() * (2 if is_linear else 1))
            assert ours.requires_grad is not is_linear
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert read.config.to_json_string(use_diff=False) == plain.config.to_json_string(use_diff=False)
        assert vars(read).keys() == vars(plain).keys(), "a mark of quantisation is left"
        assert vars(read.config).keys() == vars(plain.config).keys()

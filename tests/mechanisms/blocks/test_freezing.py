"""Groups of depth: found in networks of every family, each parameter that trains in exactly one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lit_efficient import GPT, ConfigurationError, DiT, DiTConfig, GPTConfig, LoRA, depth_groups
from lit_efficient.application import apply
from lit_efficient.declaration import held
from lit_efficient.mechanisms.blocks.freezing import hold, label, release
from tests.support import Net
from tests.timm_models import import_timm

SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(vocab_size=11, num_labels=3, num_key_value_heads=2, **SMALL))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=11, num_labels=3, max_position_embeddings=8, **SMALL))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=4, patch_size=2, num_labels=3, **SMALL))


def _timm_vit() -> nn.Module:
    vit = import_timm().models.vision_transformer.VisionTransformer
    return vit(img_size=4, patch_size=2, embed_dim=8, depth=3, num_heads=2, num_classes=3)


def _timm_resnet() -> nn.Module:
    resnet = import_timm().models.resnet
    return resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], channels=(4, 4, 4, 4), stem_width=4, num_classes=3)


# The network, its number of groups, parameters that must be in the first group, and those that must be in the last.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], int, list[str], list[str]]] = {
    "gpt": (
        lambda: GPT(GPTConfig(vocab_size=11, dim=8, depth=3, num_heads=2, tie_embeddings=False)),
        5,
        ["head.weight"],
        ["embedding.weight"],
    ),
    "dit": (lambda: DiT(DiTConfig(width=16)), 5, ["patch_out.weight", "modulation.bias"], ["patch_in.weight"]),
    "gpt2": (_gpt2, 5, ["transformer.wte.weight", "transformer.ln_f.bias"], ["transformer.wpe.weight"]),
    "llama": (_llama, 5, ["score.weight", "model.norm.weight"], ["model.embed_tokens.weight"]),
    "bert": (_bert, 5, ["classifier.bias", "bert.pooler.dense.weight"], ["bert.embeddings.LayerNorm.bias"]),
    "vit": (_vit, 5, ["classifier.bias", "vit.layernorm.bias"], ["vit.embeddings.cls_token"]),
    "timm_vit": (_timm_vit, 5, ["head.weight", "norm.bias"], ["cls_token", "pos_embed", "patch_embed.proj.bias"]),
    "timm_resnet": (_timm_resnet, 10, ["fc.weight"], ["conv1.weight", "bn1.weight"]),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_is_in_one_group_from_head_to_stem(name: str) -> None:
    make, count, first, last = FAMILIES[name]
    module = make()
    groups = depth_groups(module)
    assert sorted(n for names in groups for n in names) == sorted(n for n, _ in module.named_parameters())
    assert len(groups) == count
    assert set(first) <= set(groups[0])
    assert set(last) <= set(groups[-1])
    blocks = [label(names) for names in groups[1:-1]]  # one block each, the last one first
    assert [name.rpartition(".")[0] for name in blocks] == sorted((b.rpartition(".")[0] for b in blocks), reverse=True)
    assert blocks == sorted(blocks, reverse=True)


def test_a_tied_weight_belongs_to_the_first_group_that_holds_it() -> None:
    module = GPT(GPTConfig(vocab_size=11, dim=8, depth=2, num_heads=2))
    assert depth_groups(module)[0] == ["embedding.weight", "norm.weight"]
    assert depth_groups(module, ["norm", "blocks", "head"])[2] == ["embedding.weight"]


def test_equal_parameters_are_two_parameters() -> None:
    """Lightning's BackboneFinetuning compares by value, and drops one of them."""
    net = Net(4, 2)
    net.load_state_dict({key: torch.zeros_like(t) for key, t in net.state_dict().items()})
    groups = depth_groups(net)
    assert sorted(n for names in groups for n in names) == sorted(n for n, _ in net.named_parameters())


def test_what_is_frozen_is_in_no_group_and_adapters_are() -> None:
    net = Net(4, 2)
    net.blocks[1].requires_grad_(False)
    assert [label(names) for names in depth_groups(net)] == ["head", "blocks.0", "stem"]
    adapted = Net(4, 2)
    apply(adapted, [LoRA(rank=2, targets=["up"])])
    assert depth_groups(adapted) == [[f"blocks.{i}.up.lora_A", f"blocks.{i}.up.lora_B"] for i in (1, 0)]


def test_patterns_take_what_earlier_ones_left() -> None:
    net = Net(4, 3)
    groups = depth_groups(net, ["head", [r"blocks\.2", r"blocks\.1\.norm"], r"blocks", r".*"])
    assert [len(names) for names in groups] == [2, 8, 10, 2]
    assert {"blocks.1.norm.weight", "blocks.2.up.bias"} <= set(groups[1])
    assert groups[3] == ["stem.weight", "stem.bias"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["head", "blocks"], r"no group matches 2 of 16 trainable parameters: stem\.weight, stem\.bias"),
        (
            ["hed", ".*"],
            r"the pattern 'hed' matches none of the \d+ parameters that it could, whose names end in: head",
        ),
        (["head", ".*", "stem"], "the group 'stem' is empty"),
        (["(", ".*"], "'\\(' is no regular expression"),
        ("head", "groups must be auto or a list"),
        ([], "groups must be auto or a list"),
    ],
)
def test_bad_groups_are_errors(groups: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        depth_groups(Net(4, 2), groups)


def test_only_what_was_held_is_released() -> None:
    net = Net(4, 2)
    net.stem.weight.requires_grad_(False)
    net.head.weight.grad = torch.ones(4, 4)
    hold(net, ["head.weight", "head.bias"])
    assert held(net) == {"head.weight", "head.bias"}
    assert net.head.weight.grad is None
    assert not net.head.weight.requires_grad
    release(net, ["head.bias", "stem.weight"])
    assert [net.head.bias.requires_grad, net.head.weight.requires_grad] == [True, False]
    release(net)
    assert net.head.weight.requires_grad
    assert not net.stem.weight.requires_grad
    assert held(net) == frozenset()

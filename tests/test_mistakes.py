"""Mistakes that people make in Python: each is said in a sentence that names the argument, or is what was meant."""

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_efficient import (
    ActivationCheckpointing,
    CausalLMConfig,
    GPTConfig,
    LanguageModeling,
    LoRA,
    PowerEMA,
    apply,
    restore,
)
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import targets_of
from lit_efficient.surgery import match_modules


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a class for a technique": (lambda: apply(Module(), [LoRA]), "apply: .* instances, .* got .*LoRA"),
    "a class for a module": (lambda: apply(Module, [LoRA()]), "apply: .* instances, .* got .*Module"),
    "a class to restore": (
        lambda: restore(Module, "x.ckpt"),
        r"restore: module must be an instance, as MyM.*\(\)",
    ),
    "layers by class": (lambda: apply(Module(), [LoRA(targets=[nn.Linear])]), "LoRA: .* a pattern must be a text"),
    "blocks by class": (
        lambda: apply(Module(), [ActivationCheckpointing(blocks=[nn.Linear])]),
        "ActivationCheckpointing: a pattern must be a text.*Linear",
    ),
    "no targets": (lambda: apply(Module(), [LoRA(targets=None)]), "LoRA: targets must be .*, got None"),
    "a width for widths": (lambda: PowerEMA(sigma_rels=0.05), r"PowerEMA: sigma_rels must be a list.*got 0\.05"),
    "a word for widths": (lambda: PowerEMA(sigma_rels="0.05"), r"PowerEMA: sigma_rels must be .*got '0\.05'"),
    "a hub's name for a model": (
        lambda: LanguageModeling("gpt2"),
        "LanguageModeling: model must be a GPTConfig or a CausalLMConfig, got 'gpt2'",
    ),
    "batches of tuples": (
        lambda: targets_of([torch.ones(2, 3)]),
        "a batch must be a mapping .*labels, got .*list",
    ),
    "batches without labels": (lambda: targets_of({"input_ids": torch.ones(2, 3)}), r"labels, got \['input_ids'\]"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_a_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_what_is_meant_by_one_for_a_list() -> None:
    assert set(apply(Module(), LoRA())) == {"LoRA"}
    assert [name for name, _ in match_modules(Module(), "net.2", who="x")] == ["net.2"]
    module = Module()
    apply(module, [LoRA(targets="net.0", modules_to_save="net.2")])
    assert {name for name, p in module.named_parameters() if p.requires_grad and "lora" not in name} == {
        "net.2.weight",
        "net.2.bias",
    }
    for model in (GPTConfig(vocab_size=8), CausalLMConfig(config_fields={"model_type": "llama"})):
        assert LanguageModeling(model).model is model

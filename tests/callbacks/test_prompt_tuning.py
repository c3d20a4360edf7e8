"""PromptTuning: equality with embeddings put before the sequence, generation, peft, and the most similar tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, PromptTuning
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.mechanisms.adapters.prompt import nearest_tokens
from lit_efficient.models.networks.gpt import GPT, GPTConfig, rotary_table
from lit_efficient.testing import Run
from tests.contract import effects
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import FAMILIES, IDS, Language, decoder, logits
from tests.support import QUIET, AttentionNet
from tests.support_cli import export

TOKENS = [5, 9, 30]


def trains_virtual_tokens_alone(run: Run) -> None:
    """Only the virtual tokens train and are saved."""
    effects.assert_base_is_frozen(run, r"prompt_tuning\.")


ROW = Row(
    lambda: PromptTuning(3, init_tokens=[1, 5]),
    trains_virtual_tokens_alone,
    network=AttentionNet,
    beside={"LowBitOptimizer": lambda: PromptTuning(32, init_tokens=[1, 5])},  # fewer cost more in 8 bits
)


def moved(root: Any, seed: int = 3) -> torch.Tensor:
    """Move the virtual tokens away from embeddings of words, and return them."""
    (embedded,) = (p for p in root.parameters() if p.requires_grad)
    with torch.no_grad():
        embedded.add_(torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.3)
    return embedded


def test_our_gpt_computes_what_it_does_with_embeddings_in_front() -> None:
    torch.manual_seed(0)
    network = GPT(GPTConfig(32, dim=16, depth=2, num_heads=2, hidden_dim=32, max_length=24))
    root = nn.ModuleDict({"model": network})
    apply(root, [PromptTuning(init_tokens=TOKENS)])
    embedded = moved(root)
    ids = torch.arange(10).reshape(2, 5)
    y = network(ids)
    y.square().sum().backward()
    gradient, embedded.grad = embedded.grad, None
    x = torch.cat([embedded.expand(2, 3, 16), network.embedding(ids)], dim=1)
    rotary = rotary_table(0, 8, 8, 10_000.0, ids.device)
    for block in network.blocks:
        x = block(x, rotary)
    slow = network.head(network.norm(x))[:, 3:]
    slow.square().sum().backward()
    torch.testing.assert_close(y, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, embedded.grad, rtol=1e-4, atol=1e-5)
    cached, plain = (network.generate(ids, 6, temperature=0, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.turns(4, always=["Llama"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_virtual_tokens_and_computes_the_same(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    module = Language(decoder(family))
    run = L.Trainer(callbacks=[PromptTuning(init_tokens=TOKENS)], **QUIET, max_epochs=1)
    torch.manual_seed(0)
    run.fit(module)
    moved(module)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    kept = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert [name.rpartition(".")[2] for name in kept] == ["prompt_embeddings"]
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out"), "--no-check"]) == 0
    theirs = PeftModel.from_pretrained(decoder(family), tmp_path / "out").eval()
    y = logits(module.network.eval())
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=IDS).logits[:, 3:], y, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(decoder(family)), y, atol=1e-4)


def test_it_starts_as_peft_does_and_says_the_nearest_words(caplog: pytest.LogCaptureFixture) -> None:
    module = Language(decoder("Llama"))
    technique = PromptTuning(4, init_tokens=[5, 9])
    run = L.Trainer(callbacks=[technique], **QUIET, max_epochs=1)
    with caplog.at_level(logging.INFO):
        run.fit(module)
    table = module.network.get_input_embeddings().weight
    again = Language(decoder("Llama"))
    apply(again, [technique])
    (start,) = (p for p in again.parameters() if p.requires_grad)
    assert torch.equal(start, table[[5, 9, 5, 9]])  # the embeddings of the words, as in peft
    assert technique.nearest(again) == [5, 9, 5, 9]
    assert f"virtual tokens are {', '.join(map(str, technique.nearest(module)))}" in caplog.text
    assert nearest_tokens(table[[7]] * 3 + 1e-3, table)[0] == [7]
    assert reports_of(module)["PromptTuning"].parameters == 4 * 16
    one, two = Language(decoder("Llama")), Language(decoder("Llama"))
    for root, seed in ((one, 1), (two, 1)):
        torch.manual_seed(id(root) % 7)
        apply(root, [PromptTuning(6, init="random", seed=seed)])
    values = [next(p for p in root.parameters() if p.requires_grad) for root in (one, two)]
    assert torch.equal(values[0], values[1])


def test_words_that_it_starts_from_are_the_words_that_it_says(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "be": 5, "brief": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    technique, module = PromptTuning(3, init_text="be brief", tokenizer=str(tmp_path)), Language(decoder("Llama"))
    apply(module, [technique])
    assert technique.nearest(module) == ["be", "brief", "be"]  # of a module without a tokenizer of its own


def test_bad_arguments_are_named() -> None:
    for arguments, words in (
        ({"init": "zeros"}, "init must be one of tokens, random"),
        ({}, "needs either init_tokens or init_text, got neither"),
        ({"init": "random"}, "init='random' needs num_virtual_tokens"),
        ({"init_text": "a"}, "init_text and tokenizer .* go together"),
        ({"num_virtual_tokens": 0, "init": "random"}, "num_virtual_tokens must be"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            PromptTuning(**arguments)  # type: ignore[arg-type]
    for tokens, words in (
        ([99], "init_tokens must be"),
        ([1] * 99, "PromptTuning: num_virtual_tokens must be at most max_length = 64"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            apply(AttentionNet(), [PromptTuning(init_tokens=tokens)])
    network = AttentionNet()
    apply(network, [PromptTuning(init_tokens=[1, 2, 3])])
    for call, words in (
        (lambda: network.gpt(torch.zeros(1, 62, dtype=torch.long)), "take 3 of the max_length = 64 positions"),
        (lambda: network.gpt.features(IDS % 8, None, IDS), "PromptTuning: lit_efficient.GPT does not support"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call()
    base = decoder("Llama")
    base.model.gradient_checkpointing = True
    with pytest.raises(ConfigurationError, match="PromptTuning cannot be combined with gradient checkpointing"):
        apply(Language(base), [PromptTuning(init_tokens=TOKENS)])

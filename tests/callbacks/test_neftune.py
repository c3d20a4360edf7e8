"""NEFTune: transformers' noise without padding, numbers of real tokens with padding, only in training, and resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.integrations.neftune import neftune_post_forward_hook

from lit_efficient import ConfigurationError, LanguageModeling, NEFTune
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.callbacks.neftune import noisy_embeddings, text_lengths
from lit_efficient.testing import Run
from tests.contract import effects
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import decoder
from tests.support import AttentionNet, trainer


def is_noisy(run: Run) -> None:
    """In training, embeddings differ from those in evaluation by at most alpha / sqrt(L d)."""
    layer, ids = run.module.net.gpt.embedding, torch.arange(8).reshape(2, 4) % 8
    run.module.eval()
    with torch.no_grad():
        plain = layer(ids)
        with effects.training(run):
            noise = layer(ids) - plain
    assert 0 < float(noise.abs().max()) <= 5 / (4 * 16) ** 0.5 + 1e-6
    assert torch.equal(layer(ids), plain)


ROW = Row(NEFTune, is_noisy, lambda: NEFTune(alpha=0.0), network=AttentionNet)


def test_the_noise_is_that_of_transformers() -> None:
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    layer: Any = nn.Identity()
    layer.neftune_noise_alpha = 5.0
    torch.manual_seed(1)
    theirs = neftune_post_forward_hook(layer, (None,), x)
    torch.manual_seed(1)
    torch.testing.assert_close(noisy_embeddings(x, 5.0), theirs)


def test_padding_counts_for_nothing_and_packed_texts_each_for_themselves() -> None:
    x = torch.zeros(2, 6, 4)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert text_lengths(mask, None).tolist() == [[2, 2, 0, 0, 0, 0], [0, 0, 4, 4, 4, 4]]
    noise = noisy_embeddings(x, 3.0, text_lengths(mask, None), torch.Generator().manual_seed(0))
    alone = noisy_embeddings(x, 1.0, torch.ones(2, 6), torch.Generator().manual_seed(0)) * 2  # uniform, in [-1, 1)
    assert torch.equal(noise != 0, mask.bool()[..., None].expand_as(x))
    torch.testing.assert_close(noise[0, :2], alone[0, :2] * 3 / 8**0.5)
    torch.testing.assert_close(noise[1, 2:], alone[1, 2:] * 3 / 16**0.5)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])
    assert text_lengths(None, positions[:1]).tolist() == [[3, 3, 3, 2, 2, 1]]
    assert text_lengths(mask[1:], positions[1:]).tolist() == [[0, 0, 4, 4, 4, 4]]


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_network_is_asked_what_it_was_called_with(family: str) -> None:
    network = decoder(family)
    root = nn.ModuleDict({"model": network})
    apply(root, [NEFTune(alpha=1.0)])
    (name,) = reports_of(root)["NEFTune"].modules
    layer: Any = root.get_submodule(name)
    assert layer is network.get_input_embeddings()
    seen: list[Any] = []
    layer.register_forward_hook(
        lambda _, args, output: seen.append((output - nn.functional.embedding(args[0], layer.weight)).detach())
    )
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    network.train()(input_ids=ids, attention_mask=mask)
    network(ids, *([None] if family == "GPT2" else []), mask)  # by their places
    network.eval()(input_ids=ids, attention_mask=mask)
    width = seen[0].shape[-1]
    for noise in seen[:2]:
        assert not noise[1, 1:].any()
        assert 0 < float(noise[0].abs().max()) <= 1 / (4 * width) ** 0.5 + 1e-6
        assert 1 / (4 * width) ** 0.5 < float(noise[1, 0].abs().max()) <= 1 / width**0.5 + 1e-6
    assert not seen[2].any()
    assert layer.token_rows == {}


def test_where_the_network_is_not_told_the_batch_is_asked() -> None:
    class Watched(LanguageModeling):
        rows: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            network: Any = self.network
            self.rows = dict(network.embedding.token_rows)
            return super().training_step(batch, batch_idx)

    module = Watched({"dim": 16, "depth": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 32, "max_length": 16})
    ids = torch.arange(8).reshape(2, 4)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    trainer([NEFTune()], max_steps=1).fit(module, DataLoader([batch], None), DataLoader([batch], None))
    assert torch.equal(module.rows["attention_mask"], batch["attention_mask"])
    network: Any = module.network
    assert network.embedding.token_rows == {}
    assert network.embedding._noise_seed is None


def test_what_is_no_embedding_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"has 0 embeddings.*there are none"):
        apply(nn.Linear(2, 2), [NEFTune()])
    two = nn.ModuleDict({"words": nn.Embedding(4, 2), "places": nn.Embedding(4, 2)})
    with pytest.raises(ConfigurationError, match=r"name it with embeddings= \(words, places\)"):
        apply(two, [NEFTune()])
    apply(two, [NEFTune(embeddings="words")])
    with pytest.raises(ConfigurationError, match=r"'words' gives embeddings of the shape \[3, 2\]"):
        two["words"](torch.arange(3))
    with pytest.raises(ConfigurationError, match="alpha must be at least 0, got -1"):
        NEFTune(alpha=-1)

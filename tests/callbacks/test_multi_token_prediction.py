"""MultiTokenPrediction: the loss of the formula in loops, gradients for the network, nothing in exports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lit_efficient import ChunkedCrossEntropy, ConfigurationError, LanguageModeling, MultiTokenPrediction
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.models.networks.next_depth import NextDepth, second_targets
from tests.contract.effects import predicts_second_tokens
from tests.contract.row import Row
from tests.support import AttentionNet, Toy, data, trainer

ROW = Row(MultiTokenPrediction, predicts_second_tokens, network=AttentionNet)
HEADS = 2


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Rotate the pairs of a head, as complex numbers."""
    half = len(x) // 2
    angle = [position * 10_000.0 ** (-2 * i / len(x)) for i in range(half)]
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), torch.tensor(angle).double())
    return torch.cat((pairs.real, pairs.imag))


def expected_loss(depth: Any, hidden: Tensor, table: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
    """One sum for each token, head and key, without the last tokens of each document."""
    losses = []
    for row in range(len(ids)):
        x = []
        for t in range(ids.shape[1] - 1):
            both = (norm(hidden[row, t], depth.scales[0]), norm(table[ids[row, t + 1]], depth.scales[1]))
            x.append(depth.projection @ torch.cat(both))
        inner = [norm(one, depth.scales[2]) for one in x]
        for t in range(len(x)):
            begin = int(starts[row, t])
            mixed = []
            for head in range(HEADS):
                part = slice(head * len(x[0]) // HEADS, (head + 1) * len(x[0]) // HEADS)
                query = turned((depth.query @ inner[t])[part], t - begin)
                scores, values = [], []
                for s in range(begin, t + 1):
                    key = turned((depth.key @ inner[s])[part], s - begin)
                    scores.append(query @ key / math.sqrt(len(key)))
                    values.append((depth.value @ inner[s])[part])
                mixed.append((torch.stack(scores).softmax(0)[:, None] * torch.stack(values)).sum(0))
            y = x[t] + depth.out @ torch.cat(mixed)
            z = norm(y, depth.scales[3])
            gate = depth.gate @ z
            y = y + depth.down @ (gate / (1 + (-gate).exp()) * (depth.up @ z))
            if t + 2 < ids.shape[1] and starts[row, t + 2] == begin:
                logits = table @ norm(y, depth.scales[4])
                losses.append(logits.logsumexp(0) - logits[ids[row, t + 2]])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_the_formulas(packed: bool) -> None:
    torch.manual_seed(0)
    depth = NextDepth(8, HEADS).double()
    for parameter in depth.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden, table = torch.randn(2, 7, 8).double(), torch.randn(11, 8).double()
    ids = torch.randint(11, (2, 7))
    starts, labels, positions = torch.zeros(2, 7), ids.clone(), None
    if packed:
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 1, 2, 3]])
        starts = torch.arange(7) - positions
        labels[positions == 0] = IGNORE
    targets = second_targets(torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE), positions)
    logits = depth(hidden, table[ids], positions) @ table.T
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(found, expected_loss(depth, hidden, table, ids, starts), rtol=1e-6, atol=1e-6)


class Tokens(torch.utils.data.Dataset):
    """Rows of tokens, two documents in each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(16, (12,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[[0, 5]] = IGNORE
        positions = torch.cat((torch.arange(5), torch.arange(7)))
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def fitted(model: Any, callbacks: list[Any]) -> Any:
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(Tokens(), 4)
    module = LanguageModeling(model, warmup_steps=0)
    run = trainer(callbacks, max_epochs=1)
    run.fit(module, loader, loader)
    return run


GPT = GPTConfig(16, dim=16, depth=1, num_heads=2, hidden_dim=32, max_length=16)


def test_language_models_train_with_it_and_evaluate_and_export_without(tmp_path: Any) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
            max_position_embeddings=16,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    for model in (GPT, {"name_or_path": str(tmp_path), "config_fields": {}}):
        plain = fitted(model, [])
        run = fitted(model, [MultiTokenPrediction()])
        chunked = fitted(model, [MultiTokenPrediction(), ChunkedCrossEntropy(chunk_size=5)])
        term = run.callback_metrics["train/multi_token_prediction"]
        assert 2 < term < 4  # log 16 at random
        torch.testing.assert_close(chunked.callback_metrics["train/multi_token_prediction"], term)
        assert run.callback_metrics["val/loss"] != plain.callback_metrics["val/loss"]
        run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
        assert saved.keys() == plain.lightning_module.state_dict().keys()
        for name, tensor in plain.lightning_module.state_dict().items():
            assert not torch.equal(saved[name], tensor), name
        loaded = LanguageModeling.load_from_checkpoint(tmp_path / "a.ckpt")
        again = trainer([]).validate(loaded, torch.utils.data.DataLoader(Tokens(), 4), verbose=False)
        assert again[0]["val/loss"] == pytest.approx(float(run.callback_metrics["val/loss"]), rel=1e-5)


def test_what_it_cannot_extend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Toy has no causal language model that takes labels"):
        trainer([MultiTokenPrediction()]).fit(Toy("init"), data(), data())
    with pytest.raises(ConfigurationError, match=r"MultiTokenPrediction: weight must be above 0, got 0\.0"):
        MultiTokenPrediction(weight=0.0)
    with pytest.raises(ConfigurationError, match="num_heads must be a number whose double divides 16, got 3"):
        fitted(GPT, [MultiTokenPrediction(num_heads=3)])

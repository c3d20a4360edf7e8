"""MultiTokenPrediction: the loss of the formula in loops, gradients for the network, nothing in exports."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

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


@pytest.mark.turns(6, family="slow")
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


def test_chunks_hold_the_logits_of_the_second_tokens_and_give_the_same_gradients(tmp_path: Any) -> None:
    """With a factor and a soft bound of the logits, as of Gemma."""
    config = Gemma2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=19, max_position_embeddings=16, final_logit_softcapping=1.5,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    found: list[tuple[int, Tensor, dict[str, Tensor]]] = []
    for more in ([], [ChunkedCrossEntropy(chunk_size=5)]):
        run = fitted(
            {"name_or_path": str(tmp_path), "config_fields": {}}, [MultiTokenPrediction(), *more, rows := Rows()]
        )
        state = run.lightning_module.state_dict()
        found.append((rows.most, run.callback_metrics["train/multi_token_prediction"], state))
    assert [most for most, _, _ in found] == [4 * 12, 5]
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=1e-4, atol=1e-6)


class Rows(L.Callback):
    """Callback that notes the largest number of rows of logits that the training makes."""

    most = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.mode = Largest(self)
        self.mode.__enter__()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.mode.__exit__(None, None, None)


class Largest(TorchDispatchMode):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) and output.shape[-1] == 19:
            self.rows.most = max(self.rows.most, len(output))
        return output


class Causal(L.LightningModule):
    """A task that makes its labels from the padding mask."""

    def __init__(self, kind: str, **fields: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16}
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **fields))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
        loss: Tensor = self.model(**batch, labels=labels).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 0.05}),
        ("granite", {"logits_scaling": 0.05}),
        ("falcon_h1", {"lm_head_multiplier": 20.0, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}),
    ],
)
def test_logits_are_the_networks_and_padding_is_no_target(kind: str, fields: dict[str, Any]) -> None:
    """The factor and the soft cap that the network applies to its logits hold for the second loss, too."""
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    technique = MultiTokenPrediction()
    run = trainer([technique], max_steps=1)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    run.fit(module := Causal(kind, **fields), torch.utils.data.DataLoader([batch], batch_size=None))
    found: list[Tensor] = []
    head = module.model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0])), torch.no_grad():
        module.model(**batch)
    depth: Any = technique.heads(module)["0"]
    with torch.no_grad():
        logits = head(depth(found[0], module.model.get_input_embeddings()(ids)))
    if kind == "gemma2":
        logits = 0.05 * (logits / 0.05).tanh()
    elif kind in ("granite", "falcon_h1"):
        logits = logits / 0.05
    losses = [-logits[b, t].log_softmax(0)[ids[b, t + 2]] for b, n in enumerate((8, 4)) for t in range(n - 2)]
    found_term = run.callback_metrics["train/multi_token_prediction"]
    torch.testing.assert_close(found_term, torch.stack(losses).mean(), rtol=1e-5, atol=1e-5)


def test_a_network_that_changes_its_logits_otherwise_is_refused() -> None:
    """HyperCLOVA X multiplies by what others divide by."""
    batch = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    run = trainer([MultiTokenPrediction()], max_steps=1)
    with pytest.raises(ConfigurationError, match="HyperCLOVAXForCausalLM changes its logits after the head in a way"):
        run.fit(Causal("hyperclovax", logits_scaling=4.0), torch.utils.data.DataLoader([batch], batch_size=None))


def test_padding_on_the_left_changes_nothing() -> None:
    """The block attends to no padding, and no padding predicts the first tokens of a row."""
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    terms = []
    for shift in (0, 3):
        batch = {"input_ids": ids.clone(), "attention_mask": mask.clone()}
        for rows in batch.values():
            rows[1] = rows[1].roll(shift)
        run = trainer([MultiTokenPrediction()], max_steps=1)
        run.fit(Causal("llama"), torch.utils.data.DataLoader([batch], batch_size=None))
        terms.append(run.callback_metrics["train/multi_token_prediction"])
    torch.testing.assert_close(*terms, rtol=1e-5, atol=1e-6)


def test_the_second_target_is_in_the_document_of_the_token() -> None:
    targets = torch.tensor([[1, 2, 3, 4, 5]])  # of other documents, too
    found = second_targets(targets, torch.tensor([[0, 1, 2, 0, 1]]))
    assert found.tolist() == [[2, IGNORE, IGNORE, 5, IGNORE]]


def test_what_it_cannot_extend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Toy has no causal language model that takes labels"):
        trainer([MultiTokenPrediction()]).fit(Toy("init"), data(), data())
    with pytest.raises(ConfigurationError, match=r"MultiTokenPrediction: weight must be above 0, got 0\.0"):
        MultiTokenPrediction(weight=0.0)
    with pytest.raises(ConfigurationError, match="num_heads must be a number whose double divides 16, got 3"):
        fitted(GPT, [MultiTokenPrediction(num_heads=3)])

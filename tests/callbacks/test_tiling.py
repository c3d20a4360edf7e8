"""Tiling: padded rows change neither losses, gradients, drawn tokens nor what checkpoints hold."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lit_efficient import EMA, ChunkedCrossEntropy, ConfigurationError, ConflictError, LoRA, Tiling
from lit_efficient.application import apply
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.mechanisms.test_documents import network_of
from tests.support import Net, Toy, assert_equal, data, trainer, weights


def names_the_sizes(run: Run) -> None:
    """The toy is 16 wide."""
    technique: Any = run.technique("Tiling")
    assert technique.pad_vocabulary is None
    assert technique._batch_checked


ROW = Row(Tiling, names_the_sizes, Tiling, changes=False)
IDS = torch.tensor([[96, 1, 5, 7, 30, 2], [3, 96, 8, 20, 1, 0]])


def step(network: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of the rows that the unpadded network has."""
    out = network(IDS, labels=IDS, **more)
    loss = out.mean() if isinstance(out, torch.Tensor) else out.loss
    network.zero_grad()
    loss.backward()
    rows = {name: value.shape[0] for name, value in network.state_dict().items()}
    return loss.detach(), {name: p.grad[: rows[name]] for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["gpt", "llama", "opt"])
@pytest.mark.parametrize("chunked", [False, True])
def test_loss_gradients_and_tokens_are_those_of_the_unpadded_network(kind: str, chunked: bool) -> None:
    network = network_of(kind).eval()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    other = deepcopy(network)
    more = [ChunkedCrossEntropy(chunk_size=4)] if chunked else []
    report = apply(other, [Tiling(64), *more])["Tiling"]
    assert (report.details["vocabulary"], report.details["padded_vocabulary"]) == (97, 128)
    table = other.get_input_embeddings() if kind != "gpt" else other.embedding
    assert table.weight.shape[0] == 128
    assert_equal(state, other.state_dict())
    (loss, gradients), (padded_loss, padded_gradients) = step(network), step(other)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == padded_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert not table.weight.grad[97:].any()
    if kind != "gpt":
        table.weight.data[97:] = 100.0  # would win each draw
        found = [each.generate(IDS, max_new_tokens=4, do_sample=False) for each in (network, other)]
        assert torch.equal(*found)
    empty = network_of(kind)
    empty.load_state_dict(other.state_dict())
    other.load_state_dict(state)


class Vocabulary(Net):
    """The toy's numbers as tokens of a GPT with a vocabulary of 9."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(9, dim=16, depth=1, num_heads=2, hidden_dim=32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.gpt((2 * x + 4).long().clamp(0, 8)).logsumexp(-1)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_padded_run_is_the_plain_one_and_its_checkpoint_resumes_it(tmp_path: Path) -> None:
    def run(*callbacks: Any, path: Path | None = None) -> Toy:
        torch.manual_seed(0)
        module = Toy(network=Vocabulary)
        folder = tmp_path / str(len(callbacks))
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
        runner = trainer([*callbacks, saving], max_epochs=2, limit_val_batches=0, enable_checkpointing=True)
        runner.fit(module, data(), data(4), ckpt_path=path)
        runner.save_checkpoint(folder / "alone.ckpt", weights_only=True)
        return module

    plain = run()
    whole = run(Tiling(8), EMA(decay=0.5))
    for name, value in weights(plain).items():
        torch.testing.assert_close(whole.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert whole.net.gpt.embedding.weight.shape == (16, 16)
    assert not whole.net.gpt.embedding.weight[9:].any()
    half = tmp_path / "2" / "step=4.ckpt"
    saved = torch.load(half, weights_only=True)
    alone = torch.load(tmp_path / "2" / "alone.ckpt", weights_only=True)
    for held in (saved["state_dict"], saved["callbacks"]["EMA"]["average"], alone["state_dict"]):
        tensors = [value for name, value in held.items() if "embedding" in name or "gpt.head" in name]
        assert tensors
        assert all(value.shape == (9, 16) for value in tensors)
    plain.load_state_dict(alone["state_dict"])  # the average, which a network without padding takes
    assert_equal(weights(whole), weights(run(Tiling(8), EMA(decay=0.5), path=half)))


def test_what_transformers_saves_a_stranger_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = network_of("opt").eval()  # whose head is tied
    plain = network(IDS).logits
    apply(network, [Tiling(64)])
    network.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight.shape[0] == 97
    torch.testing.assert_close(loaded(IDS).logits, plain)


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"'net.gpt.head' is padded and has an adapter"):
        trainer([Tiling(8), LoRA(targets=["gpt.head"])]).fit(Toy(network=Vocabulary), data(), data(4))
    trainer([Tiling(8), LoRA(targets=["gpt.*query"])], max_steps=1).fit(Toy(network=Vocabulary), data(), data(4))
    network = network_of("llama")
    with pytest.raises(ConfigurationError, match="would change nothing: vocabulary 97"):
        apply(network, [Tiling(97)])
    with pytest.raises(ConfigurationError, match="has 0 such pairs"):
        apply(Net(), [Tiling(8)])
    with pytest.raises(ConfigurationError, match="pad_vocabulary must be"):
        Tiling(1)
    layers = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 128))
    assert apply(layers, [Tiling()])["Tiling"].summary == "no multiples of 64: 65 in 2 layers (0)"

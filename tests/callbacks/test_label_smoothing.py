"""LabelSmoothing: torch's numbers for any caller of cross_entropy, in chunks and compiled; only in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import ChunkedCrossEntropy, Compile, ConfigurationError, LanguageModeling
from lit_efficient.callbacks.label_smoothing import smooth_labels
from lit_efficient.losses.deferred_logits import ChunkedLoss
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import TokenNet, trainer


class LabelSmoothing(lit_efficient.LabelSmoothing):
    """Record the label smoothing of each loss of the training steps."""

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon)
        self.recorded: list[float] = []

    @contextmanager
    def watch_step(self, module: nn.Module, batch: Any) -> Iterator[None]:
        plain = F.cross_entropy
        with super().watch_step(module, batch):
            smoothed = F.cross_entropy

            def record(logits: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
                loss = smoothed(logits, labels, **arguments)
                # Torch finds its own function again by this name, for modes such as the fake GPU's.
                F.cross_entropy = plain
                expected = plain(logits, labels, **arguments, label_smoothing=self.epsilon)
                F.cross_entropy = record
                self.recorded.append(self.epsilon if torch.equal(loss, expected) else 0.0)
                return loss

            heads = [part.chunked_loss for part in module.modules() if hasattr(part, "chunked_loss")]
            self.recorded += [head.label_smoothing for head in heads if isinstance(head, ChunkedLoss)]
            F.cross_entropy = record
            try:
                yield
            finally:
                F.cross_entropy = smoothed


def targets_are_smoothed(run: Run) -> None:
    """Each loss has smoothed targets and is at least the entropy of a smoothed target."""
    recorded = run.technique("LabelSmoothing").recorded
    assert recorded
    assert set(recorded) == {0.3}
    classes = 24 if "head" in dict(run.module.net.named_children()) else 8
    floor = -(0.7 + 0.3 / classes) * torch.tensor(0.7 + 0.3 / classes).log()
    floor -= (classes - 1) * 0.3 / classes * torch.tensor(0.3 / classes).log()
    assert all((step.seen["sample_loss"] >= floor - 1e-4).all() for step in run.steps)


ROW = Row(lambda: LabelSmoothing(0.3), targets_are_smoothed, lambda: LabelSmoothing(0.0), network=TokenNet)


def test_every_cross_entropy_inside_is_torchs_with_label_smoothing() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, -100, 6, 1])
    weight = torch.linspace(0.5, 2, 7)
    wanted = F.cross_entropy(logits, labels, weight, label_smoothing=0.2)
    with smooth_labels(0.2) as smoothed:
        assert not smoothed.used
        torch.testing.assert_close(F.cross_entropy(logits, labels, weight), wanted)
        torch.testing.assert_close(nn.CrossEntropyLoss(weight)(logits, labels), wanted)
        assert smoothed.used
        with pytest.raises(ConfigurationError, match=r"F.cross_entropy has a label_smoothing of its own"):
            F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert not torch.allclose(F.cross_entropy(logits, labels, weight), wanted)


class Watched(LanguageModeling):
    """Module that records its losses."""

    def __init__(self) -> None:
        super().__init__({"dim": 16, "depth": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 32, "max_length": 16})
        self.losses: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.losses["train"] = output["loss"].detach()
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        losses, targets, _ = self._losses(batch)
        self.losses["val"] = losses.sum() / (targets != -100).sum()


@pytest.mark.turns(3, always=["nothing", "ChunkedCrossEntropy"])
@pytest.mark.parametrize("beside", ["nothing", "ChunkedCrossEntropy", "Compile"])
def test_a_language_model_is_smoothed_in_training_alone(beside: str) -> None:
    others: dict[str, list[Any]] = {
        "nothing": [],
        "ChunkedCrossEntropy": [ChunkedCrossEntropy(chunk_size=3)],
        "Compile": [Compile(modules="network", backend="eager")],
    }
    torch.manual_seed(0)
    module = Watched()
    ids = torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "shift_labels": (ids + 3).masked_fill(ids == 5, -100)}
    module.learning_rate = 1e-12
    run = trainer([lit_efficient.LabelSmoothing(0.25), *others[beside]], max_steps=1)
    run.fit(module, DataLoader([batch], None), DataLoader([batch], None))
    network: Any = module.network
    with torch.no_grad():
        logits = network(ids).flatten(0, 1)
    labels = batch["shift_labels"].flatten()
    torch.testing.assert_close(module.losses["train"], F.cross_entropy(logits, labels, label_smoothing=0.25))
    torch.testing.assert_close(module.losses["val"], F.cross_entropy(logits, labels))


def test_what_smooths_nothing_or_twice_is_refused() -> None:
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    both = [lit_efficient.LabelSmoothing(), ChunkedCrossEntropy(label_smoothing=0.1)]
    with pytest.raises(ConfigurationError, match="ChunkedCrossEntropy has a label_smoothing of its own"):
        trainer(both, max_steps=1).fit(Watched(), DataLoader([batch], None), DataLoader([batch], None))

    class Squares(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ConfigurationError, match=r"Squares.training_step did not call F.cross_entropy"):
        trainer([lit_efficient.LabelSmoothing()], max_steps=1).fit(Squares(), DataLoader([torch.ones(2)]))
    with pytest.raises(ConfigurationError, match="epsilon must be at least 0 and below 1, got 1"):
        lit_efficient.LabelSmoothing(1)

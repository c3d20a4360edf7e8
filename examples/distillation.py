"""Distillation in your own module: a small classifier learns a larger one's probabilities on unlabelled data.

    python examples/distillation.py

A teacher is trained on 300 labelled digits. A student of a twentieth of its size learns from the teacher on these and
1,200 unlabelled digits. For comparison, another student is trained on the 300 labels only. For language models use the
task of configs/llm/distillation.yaml, which computes the loss in chunks of tokens.
"""

import lightning.pytorch as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import Divergence, ExactResume, distillation_divergence

LABELLED, TRAINED = 300, 1500


class Classifier(L.LightningModule):
    """Learns labels, or how likely a teacher finds each class."""

    def __init__(self, width: int, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self._teacher = [teacher.requires_grad_(False).eval()] if teacher else []  # in a list: not in checkpoints

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        logits = self.net(x)
        if not self._teacher:
            return nn.functional.cross_entropy(logits, labels)
        return distillation_divergence(logits, self._teacher[0](x), Divergence("forward_kl", temperature=2.0)).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def fit(module: Classifier, rows: int, max_steps: int) -> float:
    """Train on the first rows, and return the accuracy on those that nobody has seen."""
    found = load_digits()
    x, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    train, held_out = TensorDataset(x[:rows], labels[:rows]), TensorDataset(x[TRAINED:], labels[TRAINED:])
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[ExactResume()],
    )
    trainer.fit(module, DataLoader(train, batch_size=30, shuffle=True), DataLoader(held_out, batch_size=len(held_out)))
    return float(trainer.callback_metrics["val/accuracy"])


def main(max_steps: int = 1000) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    teacher = Classifier(256)
    found = {"teacher": fit(teacher, LABELLED, max_steps)}
    for name, its_teacher, rows in (
        ("student alone", None, LABELLED),
        ("student of the teacher", teacher.net, TRAINED),
    ):
        L.seed_everything(1, verbose=False)
        found[name] = fit(Classifier(24, its_teacher), rows, max_steps)
    return found


if __name__ == "__main__":
    print(main())

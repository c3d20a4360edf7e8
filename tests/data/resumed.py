"""A run that is interrupted after six of nine steps, for data whose order must be resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from lit_efficient.callbacks.exact_resume import ExactResume
from tests.support import trainer


class Watched(LightningModule):
    """Module that keeps the tokens of every training batch. Its weight depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].flatten().tolist())
        return (self.weight - batch["input_ids"].float().mean()).square()

    def validation_step(self, batch, batch_idx):
        assert "num_bytes" in batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAtSix(Callback):
    """Callback that saves a checkpoint at the sixth step, and has no state."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def whole_and_resumed(folder: Path, data: Callable[[], LightningDataModule]) -> tuple[Watched, Watched]:
    """Return the modules of a run of nine steps and of a run that resumes after six of them with new data.

    Assert that the resumed run saw the other three batches and ended with the same weight.
    """

    def run(*callbacks: Any, **arguments: Any) -> Watched:
        module = Watched()
        made = trainer([ExactResume(seed=1), *callbacks], max_steps=9, max_epochs=-1, default_root_dir=folder)
        made.fit(module, data(), **arguments)
        return module

    whole = run(SaveAtSix(folder / "six.ckpt"))
    resumed = run(ckpt_path=folder / "six.ckpt")
    assert len(whole.seen) == 9
    assert resumed.seen == whole.seen[6:]
    assert torch.equal(resumed.weight, whole.weight)
    return whole, resumed

"""A callback that has its process killed once."""

import os
from pathlib import Path

from lightning.pytorch import Callback


class DiesOnce(Callback):
    """Kill one process of several before a step, and not again.

    Args:
        rank: Which one.
        step: The optimizer step before which it dies.
        number: The signal: 9 kills, others may be handled.
    """

    def __init__(self, rank: int = 1, step: int = 3, number: int = 9) -> None:
        self.rank, self.step, self.number = rank, step, number

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), self.number)

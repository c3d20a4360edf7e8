"""Callback that records the end of each training batch, for benchmarks that run the command line."""

import time

import torch
from lightning.pytorch import Callback

MARKS: list[float] = []
WAITS: set[int] = set()  # marks before which the device must have done its work


class StepClock(Callback):
    """Appends the wall clock to :data:`MARKS`."""

    def on_train_batch_end(self, *_: object) -> None:
        if len(MARKS) in WAITS:
            torch.cuda.synchronize()
        MARKS.append(time.perf_counter())

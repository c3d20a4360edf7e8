"""Callback that records the end of each training batch, for benchmarks that run the command line."""

import time
from collections.abc import Callable

import torch
from lightning.pytorch import Callback

MARKS: list[float] = []
WAITS: set[int] = set()  # marks before which the device must have done its work
now: Callable[[], float] = time.perf_counter


class StepClock(Callback):
    """Appends the time to :data:`MARKS`."""

    def on_train_batch_end(self, *_: object) -> None:
        if len(MARKS) in WAITS:
            torch.cuda.synchronize()
        MARKS.append(now())

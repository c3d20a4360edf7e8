"""A callback that notes when each training batch ends, for the benchmarks that run the command line."""

import time

from lightning.pytorch import Callback

MARKS: list[float] = []


class StepClock(Callback):
    """Appends the wall clock to :data:`MARKS`."""

    def on_train_batch_end(self, *_: object) -> None:
        MARKS.append(time.perf_counter())

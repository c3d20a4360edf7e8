"""What one training was, and the callbacks that find it out.

Steps that are counted take longer, so one step counts bytes and is not timed. Seconds are those of the clock; on CUDA
they are those of its own queue, for which nobody waits; on a CPU that others use, they may be the process's.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_efficient.evidence.memory_kinds import StepMeter
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.mechanisms.metering import count_real

WARM_UP = 4  # steps that are not timed, the last of which is counted; of short runs the first half


@dataclass
class Measured:
    """What one run of a variant was."""

    variant: str  # the change's name
    seed: int  # what its random numbers began with
    steps: int = 0  # optimizer steps that it made
    unit: str = ""  # what amounts are counted in: ``tokens`` or ``samples``
    # of each step, with the data it waited for and all callbacks, without validation
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of this process, for each step
    amounts: list[int] = field(default_factory=list)  # tokens or samples of each step, padding left out
    losses: list[float] = field(default_factory=list)  # the training loss of each step; NaN where there is none
    # by metric of the validations: the step, the seconds of training until there, the value
    held_out: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    # bytes of tensors at the peak of a step; 0 where they cannot be seen, as those of a compiled step on a CPU
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # the same by kind
    checkpoint_bytes: int = 0  # of a checkpoint at the end
    trainable: int = 0  # parameters that train
    parameters: int = 0  # all of them
    # the loss on other held-out data, before and after; empty where none was given
    elsewhere: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""  # why there is nothing of this; else empty
    refused: bool = False  # whether it was an error of the package's, that the user can mend
    late: bool = False  # whether it took too long
    device: str = ""  # what it ran on

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps after the warm-up."""
        return self.seconds[warm_up(len(self.seconds)) :]

    @property
    def step_time(self) -> float:
        """Seconds of the median step; NaN of a run without any."""
        return statistics.median(self.timed) if self.timed else float("nan")

    @property
    def rate(self) -> float:
        """Tokens or samples a second over all timed steps, the rare slow ones too."""
        amounts = self.amounts[warm_up(len(self.seconds)) :]
        return sum(amounts) / sum(self.timed) if self.timed and sum(self.timed) else float("nan")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Measured":
        """From what :func:`dataclasses.asdict` gave, through JSON or not."""
        held_out = {name: [tuple(one) for one in rows] for name, rows in record.get("held_out", {}).items()}
        return cls(**{**record, "held_out": held_out})


def warm_up(steps: int) -> int:
    """Steps of a run that are not timed."""
    return min(WARM_UP, steps // 2)


class StepWatch(Callback):
    """Times each optimizer step, and notes what it trained on; comes before all other callbacks."""

    leaves_traces = True

    def __init__(self, found: Measured, tell: Callable[[int], None], cpu_time: bool = False) -> None:
        self.found, self.tell, self.cpu_time = found, tell, cpu_time
        self._clock: list[Any] = []  # one mark a step, and one before
        self._cpu: list[float] = []
        self._pauses: list[tuple[int, Any, Any]] = []  # validations: after how many steps, from, to
        self._amounts: list[Any] = []
        self._losses: list[Any] = []
        self._window: list[tuple[Any, Any]] = []  # amounts and losses since the last step
        self._values: list[tuple[int, dict[str, float]]] = []
        self._known: set[str] = set()
        self._before = 0
        self._heard = time.monotonic()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.trainable = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        self.found.parameters = sum(p.numel() for p in pl_module.parameters())
        self._before, self._device = trainer.global_step, trainer.strategy.root_device
        self.found.device = _name(self._device)
        self.mark()

    def _now(self) -> Any:
        return time.process_time() if self.cpu_time else _now(self._device)

    def mark(self) -> None:
        self._clock.append(self._now())
        self._cpu.append(time.process_time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        amount, self.found.unit = count_real(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            loss = loss.detach() * parts
        self._window.append((amount, loss))

    def stepped(self, trainer: Any) -> None:
        """The end of a batch, after all other callbacks."""
        if trainer.global_step > self._before and self._window:
            self._before = trainer.global_step
            amounts, losses = zip(*self._window)
            self._window = []
            self._amounts.append(amounts)
            self._losses.append([loss for loss in losses if loss is not None])
            self.mark()
        if time.monotonic() - self._heard > 1:
            self._heard = time.monotonic()
            self.tell(len(self._losses))

    def validate(self, trainer: Any, run: Callable[[], Any]) -> Any:
        """Run a validation within the fit, which is no part of the steps' time, and note what it logs."""
        start, before, after = self._now(), set(trainer.callback_metrics), len(self._losses)
        result = run()
        metrics = trainer.callback_metrics
        if not self._values:  # later on those of a training's epochs are new as well
            self._known = set(metrics) - before
        self._values.append((after, {name: float(metrics[name]) for name in self._known & set(metrics)}))
        self._pauses.append((after, start, self._now()))
        return result

    @property
    def moved(self) -> bool:
        """Whether there were steps since the last validation."""
        return (self._values[-1][0] if self._values else 0) < len(self._losses)

    def write(self, asked: int) -> None:
        """Put into the result what is known now that the run is over; what lies on a device is read here."""
        found, marks = self.found, self._clock
        found.seconds = [_between(a, b) for a, b in itertools.pairwise(marks)]
        for after, start, end in self._pauses:
            if after < len(found.seconds):  # that of the last step comes after it
                found.seconds[after] -= _between(start, end)
        found.cpu_seconds = [b - a for a, b in itertools.pairwise(self._cpu)]
        found.amounts = [int(sum(map(int, amounts))) for amounts in self._amounts]
        found.losses = [statistics.fmean(map(float, losses)) if losses else float("nan") for losses in self._losses]
        found.steps = len(found.losses)
        if found.kinds and len(found.seconds) > warm_up(asked) > 0:  # counting is no part of the time
            found.seconds[warm_up(asked) - 1] = found.step_time
        for step, values in self._values:
            for name, value in values.items():
                found.held_out.setdefault(name, []).append((step, sum(found.seconds[:step]), value))


class LastWatch(Callback):
    """Tells :class:`StepWatch` when all other callbacks are done, and saves the checkpoint that is weighed."""

    leaves_traces = True
    steps: StepWatch
    saves: Path | None = None
    validates: Callable[[], Any] | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.stepped(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # Steps of several optimizers are not those of batches.
        if self.validates is not None and trainer.enable_validation and self.steps.moved:
            trainer.validating = True
            self.validates()
            trainer.training = True
        if self.saves is not None:
            trainer.save_checkpoint(self.saves, weights_only=False)
            files = [self.saves] if self.saves.is_file() else [one for one in self.saves.rglob("*") if one.is_file()]
            self.steps.found.checkpoint_bytes = sum(file.stat().st_size for file in files)


class ByteWatch(StepMeter):
    """Counts the bytes of one step, those on an accelerator by its allocator's books."""

    leaves_traces = True

    def __init__(self, found: Measured, step: int) -> None:
        super().__init__()
        self.found, self.counted = found, max(0, step)
        self.began: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """It begins later."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.began is None and trainer.global_step >= self.counted:
            self.began, device = trainer.global_step, trainer.strategy.root_device
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(device)
            if not any(map(is_compiled, pl_module.modules())):
                super().on_train_start(trainer, pl_module)
        if self.meter is not None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.meter is not None:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ends = self.began is not None and trainer.global_step > self.began and not self.found.peak
        if ends and (device := trainer.strategy.root_device).type != "cpu":
            self.found.peak = int(torch.accelerator.max_memory_allocated(device))
        if self.meter is None:
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.steps:
            self.on_train_end(trainer, pl_module)
            self.found.kinds = dict(self.steps[0].kinds)
            self.found.peak = self.found.peak or self.steps[0].peak


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def _now(device: torch.device) -> Any:
    """A mark: the time, or on CUDA an event of its queue."""
    if device.type != "cuda":
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000

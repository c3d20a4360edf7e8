"""Measurements of one training, and the callbacks that make them.

Counting the bytes of a step slows it down, so one step is counted and not timed. Times are elapsed time. On CUDA they
are times of the stream, so that no step waits for the device. On a CPU that other programs use, the CPU time of the
process may be taken instead.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_efficient.evidence.memory_kinds import StepMeter
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.mechanisms.metering import count_real
from lit_efficient.traits import Trait

WARM_UP = 4  # steps that are not timed, the last of which is counted; fewer in runs of less than 8 steps


@dataclass
class Measured:
    """Measurements of one run.

    Args:
        variant: Name of the change.
        seed: Seed of the run.
        steps: Number of optimizer steps.
        unit: Unit of ``amounts``: ``tokens`` or ``samples``.
        seconds: Time of each step, with its wait for data and all callbacks, without validations.
        cpu_seconds: CPU time of this process for each step.
        amounts: Tokens or samples of each step, without padding.
        losses: Training loss of each step; NaN if the step returned none.
        held_out: For each metric of the validations: step, seconds of training until then, value.
        peak: Bytes of tensors at the peak of a step; 0 if they cannot be observed, as in a compiled step on a CPU.
        kinds: ``peak`` by kind of memory.
        checkpoint_bytes: Size of a checkpoint at the end.
        trainable: Number of trainable parameters.
        parameters: Number of parameters.
        elsewhere: Metrics on other held-out data, before and after; empty without such data.
        failed: Reason why there are no measurements; empty if there are.
        refused: True if ``failed`` is a user error that this package reported.
        late: True if the run took too long.
        device: Name of the device.
    """

    variant: str
    seed: int
    steps: int = 0
    unit: str = ""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    trainable: int = 0
    parameters: int = 0
    elsewhere: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""
    refused: bool = False
    late: bool = False
    device: str = ""

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps after the warm-up."""
        return self.seconds[warm_up(len(self.seconds)) :]

    @property
    def step_time(self) -> float:
        """Median seconds of a step; NaN without steps."""
        if self.timed:
            return statistics.median(self.timed)
        return math.nan

    @property
    def rate(self) -> float:
        """Tokens or samples a second over all timed steps, including rare slow steps; NaN without steps."""
        amounts = self.amounts[warm_up(len(self.seconds)) :]
        total = sum(self.timed)
        return sum(amounts) / total if total else math.nan

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Measured":
        """Restore the result of :func:`dataclasses.asdict`, directly or after a passage through JSON."""
        held_out = {name: [tuple(one) for one in rows] for name, rows in record.get("held_out", {}).items()}
        return cls(**{**record, "held_out": held_out})


def warm_up(steps: int) -> int:
    """Return the number of steps of a run that are not timed.

    There are at least two, because the bytes of the last one are counted, and the optimizer has no state in the first.
    A run of two steps has one, and a run of one step none.
    """
    return min(WARM_UP, max(2, steps // 2), steps - 1)


class StepWatch(Callback):
    """Measures time, amount and loss of each optimizer step. It must be the first callback.

    Args:
        found: Receives the measurements.
        tell: Function that receives the number of steps about once a second.
        cpu_time: Take the CPU time of the process instead of elapsed time.
    """

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, found: Measured, tell: Callable[[int], None], cpu_time: bool = False) -> None:
        self.found = found
        self.tell = tell
        self.cpu_time = cpu_time
        self._device = torch.device("cpu")
        # Marks are seconds or CUDA events. There is one before the first step and one after each.
        self._marks: list[object] = []
        self._cpu: list[float] = []
        self._pauses: list[
            tuple[int, object, object]
        ] = []  # of validations: number of steps before, first and last mark
        self._amounts: list[float | Tensor] = []
        self._losses: list[list[Any]] = []
        self._window: list[tuple[float | Tensor, Any]] = []  # batches since the last step
        self._values: list[tuple[int, dict[str, float]]] = []
        self._known: set[str] = set()
        self._last_step = 0
        self._told = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found.trainable = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        self.found.parameters = sum(p.numel() for p in pl_module.parameters())
        self._last_step = trainer.global_step
        self._device = trainer.strategy.root_device
        self.found.device = _name(self._device)
        self._mark()

    def _now(self) -> Any:
        if self.cpu_time:
            return time.process_time()
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _mark(self) -> None:
        self._marks.append(self._now())
        self._cpu.append(time.process_time())

    # The loss stays on its device: reading it would wait for the device in each step.
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        amount, self.found.unit = count_real(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # The graph would keep the activations of all batches alive.
        if isinstance(loss, Tensor):
            loss = loss.detach()
            if pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # Lightning divided it
        self._window.append((amount, loss))

    def stepped(self, trainer: Trainer) -> None:
        """Note the end of a batch. :class:`LastWatch` calls this after all other callbacks."""
        if trainer.global_step > self._last_step and self._window:
            self._last_step = trainer.global_step
            self._amounts.append(sum(amount for amount, _ in self._window))
            self._losses.append([loss for _, loss in self._window if loss is not None])
            self._window = []
            self._mark()
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            self.tell(len(self._losses))

    def validate(self, trainer: Trainer, run: Callable[[], object]) -> object:
        """Run a validation within the fit. Its time is subtracted from that of the step, and its metrics are noted."""
        start = self._now()
        before = set(trainer.callback_metrics)
        after = len(self._losses)
        result = run()
        metrics = trainer.callback_metrics
        if not self._values:
            # At later validations, metrics of the end of a training epoch are new as well.
            self._known = set(metrics) - before
        self._values.append((after, {name: float(metrics[name]) for name in self._known & set(metrics)}))
        self._pauses.append((after, start, self._now()))
        return result

    @property
    def moved(self) -> bool:
        """True if there were steps since the last validation."""
        validated = [step for step, _ in self._values]
        return [0, *validated][-1] < len(self._losses)

    def write(self, asked: int) -> None:
        """Write the result of a run of ``asked`` steps after its end. Values on a device are read only now."""
        found = self.found
        found.seconds = [_between(a, b) for a, b in itertools.pairwise(self._marks)]
        # A validation runs between two marks and must not count as training time.
        for after, start, end in self._pauses:
            if after < len(found.seconds):  # no step follows the last validation
                found.seconds[after] -= _between(start, end)
        found.cpu_seconds = [b - a for a, b in itertools.pairwise(self._cpu)]
        found.amounts = [int(amount) for amount in self._amounts]
        for losses in self._losses:
            mean = math.nan
            if losses:
                mean = statistics.fmean(float(loss) for loss in losses)
            found.losses.append(mean)
        found.steps = len(found.losses)
        if found.kinds and len(found.seconds) > warm_up(asked) > 0:
            found.seconds[warm_up(asked) - 1] = found.step_time  # the step whose bytes were counted
        for step, values in self._values:
            for name, value in values.items():
                found.held_out.setdefault(name, []).append((step, sum(found.seconds[:step]), value))


class LastWatch(Callback):
    """Reports the end of each batch to :class:`StepWatch`, and saves a checkpoint to measure its size.

    It must be the last callback.

    Args:
        steps: The first callback.

    Attributes:
        saves: Path of the checkpoint; ``None`` saves none.
        validates: Function that runs the validation at the end; ``None`` validates no more.
    """

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, steps: StepWatch) -> None:
        self.steps = steps
        self.saves: Path | None = None
        self.validates: Callable[[], object] | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.steps.stepped(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Several optimizers make more steps than there are batches, so the last step may have had no validation.
        if self.validates is not None and trainer.enable_validation and self.steps.moved:
            trainer.validating = True
            self.validates()
            trainer.training = True
        if self.saves is not None:
            trainer.save_checkpoint(self.saves, weights_only=False)
            files = [file for file in (self.saves, *self.saves.rglob("*")) if file.is_file()]
            self.steps.found.checkpoint_bytes = sum(file.stat().st_size for file in files)


class ByteWatch(StepMeter):
    """Counts the bytes of one step. On an accelerator the peak comes from its allocator.

    Args:
        found: Receives the measurements.
        step: Index of the step, from 0.
    """

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, found: Measured, step: int) -> None:
        super().__init__()
        self.found = found
        self.counted = max(0, step)
        self.began: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: the meter starts at the step that is counted."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self.began is None and trainer.global_step >= self.counted:
            self.began = trainer.global_step
            device = trainer.strategy.root_device
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(device)
            # Compiled code does not pass the dispatcher, so its tensors cannot be observed.
            if not any(is_compiled(part) for part in pl_module.modules()):
                super().on_train_start(trainer, pl_module)
        if self.meter is not None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.meter is not None:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        ends = self.began is not None and trainer.global_step > self.began
        if ends and device.type != "cpu" and not self.found.peak:
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
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return device.type


def _between(start: Any, end: Any) -> float:
    # CUDA events are compared after the run, when waiting for them costs nothing.
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000

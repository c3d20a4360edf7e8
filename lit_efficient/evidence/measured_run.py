"""One training of a fit, measured: in a process of its own, so that nothing of it is left and nothing before it counts.

    one = measured(source, Change("ema", overlays=("ema",)), steps=40, seed=0, validations=4)
    one.timed, one.peak, one.kinds, one.held_out["val/loss"]

The fit is the user's: all of its callbacks run, but for those that write checkpoints and draw bars. Its loggers are
replaced by one that forgets, and its files go into a folder that is thrown away. Steps that are counted take longer, so
one step counts bytes and is not timed. Seconds are those of the clock; on an accelerator they are those of its own
queue, for which nobody waits.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.memory_kinds import StepMeter
from lit_efficient.evidence.own_process import TaskFailed, own_process
from lit_efficient.internals.lightning_trainer import set_default_root_dir
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.mechanisms.metering import count_real

VAL_BATCHES = 20  # of a validation, where the fit sets no limit of its own
WARM_UP = 4  # steps that are not timed, the last of which is counted; of short runs the first half
_WRITERS = {"Checkpoint", "ProgressBar"}  # by name, because Lightning's classes exist twice


@dataclass
class Measured:
    """What one run of a variant was.

    Args:
        variant: The change's name.
        seed: What its random numbers began with.
        steps: Optimizer steps that it made.
        unit: What amounts are counted in: ``tokens`` or ``samples``.
        seconds: Of each step, with the data it waited for and all callbacks, without validation.
        cpu_seconds: Of this process, for each step.
        amounts: Tokens or samples of each step, padding left out.
        losses: The training loss of each step; NaN where there is none.
        held_out: By metric of the validations: the step, the seconds of training until there, the value.
        peak: Bytes of tensors at the peak of a step; 0 where they cannot be seen, as those of a compiled step on a CPU.
        kinds: The same by kind.
        checkpoint_bytes: Of a checkpoint at the end.
        trainable: Parameters that train.
        parameters: All of them.
        elsewhere: The loss on other held-out data, before and after; empty where none was given.
        failed: Why there is nothing of this; else empty.
        refused: Whether it was an error of the package's, that the user can mend.
        late: Whether it took too long.
        device: What it ran on.
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
        return self.seconds[_warm_up(len(self.seconds)) :]

    @property
    def step_time(self) -> float:
        """Seconds of the median step; NaN of a run without any."""
        return statistics.median(self.timed) if self.timed else float("nan")

    @property
    def rate(self) -> float:
        """Tokens or samples a second over all timed steps, the rare slow ones too."""
        amounts = self.amounts[_warm_up(len(self.seconds)) :]
        return sum(amounts) / sum(self.timed) if self.timed and sum(self.timed) else float("nan")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Measured":
        """From what :func:`dataclasses.asdict` gave, through JSON or not."""
        held_out = {name: [tuple(one) for one in rows] for name, rows in record.get("held_out", {}).items()}
        return cls(**{**record, "held_out": held_out})


def _warm_up(steps: int) -> int:
    return min(WARM_UP, steps // 2)


def measured(
    source: FitSource,
    change: Change = AS_IT_IS,
    *,
    steps: int,
    seed: int = 0,
    validations: int = 0,
    counts: bool = True,
    elsewhere: Callable[[], Any] | None = None,
    log: Path | None = None,
    heard: Callable[[int], None] = lambda step: None,
    most_seconds: float | None = None,
) -> Measured:
    """Train in a process of its own, and measure it. What goes wrong there is told in the result.

    Args:
        source: Makes the fit.
        change: What it has that the fit as it is has not.
        steps: Optimizer steps.
        seed: What random numbers begin with: those of the weights, too, where the fit makes them anew.
        validations: How many there are in the run, at the same distance, the last one at its end; each of at most
            `VAL_BATCHES` batches, where the fit sets no limit of its own.
        counts: Whether to count the bytes of a step, and of a checkpoint.
        elsewhere: Makes a DataModule or loader of other held-out data, on which the module is validated before and
            after.
        log: The file for what the run prints.
        heard: Called with the number of steps so far, about once a second.
        most_seconds: After so many the process is killed.

    Raises:
        ConfigurationError: If ``steps`` or ``validations`` are out of their range.
        KeyboardInterrupt: As it comes; the process is ended first.
    """
    check_number("measured", "steps", steps, least=1, whole=True)
    check_number("measured", "validations", validations, least=0, whole=True)
    change = replace(change, seed=seed)
    asked = _Asked(steps, seed, validations, counts, elsewhere)
    try:
        record = own_process(_measure, source, change, asked, heard=heard, log=log, most_seconds=most_seconds)
    except TaskFailed as error:
        return Measured(change.name, seed, failed=error.reason, refused=error.refused, late=error.late)
    return Measured.of(record)


@dataclass
class _Asked:
    steps: int
    seed: int
    validations: int
    counts: bool
    elsewhere: Callable[[], Any] | None


def _measure(source: FitSource, change: Change, asked: _Asked, tell: Callable[[int], None]) -> dict[str, Any]:
    found = Measured(change.name, asked.seed)
    with tempfile.TemporaryDirectory(prefix="measured-", ignore_cleanup_errors=True) as folder:
        _train(source, change, asked, found, Path(folder), tell)
    return asdict(found)


def _train(
    source: FitSource, change: Change, asked: _Asked, found: Measured, folder: Path, tell: Callable[[int], None]
) -> None:
    fit = _made(source, change, asked, folder)
    trainer: Any = fit.trainer
    before = _validated(fit, asked)
    every = trainer.accumulate_grad_batches
    if before:  # a fit that has validated is no new one
        fit = _made(source, change, asked, folder)
        trainer = fit.trainer
    batches = trainer.limit_val_batches
    if asked.validations:
        times = next(n for n in range(min(asked.validations, asked.steps), 0, -1) if asked.steps % n == 0)
        every *= asked.steps // times
        fit.change({"trainer.val_check_interval": every, "trainer.check_val_every_n_epoch": None})
    else:
        fit.change({"trainer.limit_val_batches": 0})
    steps, last = _Steps(found, tell), _Last()
    last.steps = steps
    counting = [_Bytes(found, _warm_up(asked.steps) - 1)] if asked.counts else []
    trainer.callbacks = [steps, *trainer.callbacks, *counting, last]
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.run = partial(steps.validate, trainer, loop.run)
    last.saves = folder / "end.ckpt" if asked.counts else None
    fit.run()
    steps.write(asked.steps)
    found.failed = "" if found.steps else "the fit ended before its first step"
    fit.change({"trainer.limit_val_batches": batches})
    after = _validated(fit, asked)
    found.elsewhere = {name: [value, after[name]] for name, value in before.items() if name in after}


def _made(source: FitSource, change: Change, asked: _Asked, folder: Path) -> Fit:
    """The fit, without what it writes."""
    from lightning.pytorch import seed_everything

    seed_everything(asked.seed, verbose=False)
    fit = source.make(change)
    fit.seed, trainer = asked.seed, fit.trainer
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"{trainer.world_size} processes train, and one is measured: set trainer.devices to 1 (--trainer.devices 1)"
        )
    set_default_root_dir(trainer, str(folder))
    trainer.loggers = [_Forgets(folder)] if trainer.loggers else []
    trainer.callbacks = [
        one for one in trainer.callbacks if not {base.__name__ for base in type(one).__mro__} & _WRITERS
    ]
    names = {"max_steps": asked.steps, "max_epochs": -1, "min_steps": None, "num_sanity_val_steps": 0}
    if trainer.limit_val_batches == 1.0:
        names["limit_val_batches"] = VAL_BATCHES
    fit.change({f"trainer.{name}": value for name, value in names.items()})
    return fit


def _validated(fit: Fit, asked: _Asked) -> dict[str, float]:
    """The metrics on other held-out data."""
    if asked.elsewhere is None:
        return {}
    data = asked.elsewhere()
    given = {"datamodule" if hasattr(data, "prepare_data") else "dataloaders": data}
    (*rows,) = fit.trainer.validate(fit.module, verbose=False, **given)
    return {name: float(value) for row in rows for name, value in row.items()}


class _Forgets(DummyLogger):
    """A logger that keeps nothing, whose folder can be written to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self._folder


class _Steps(Callback):
    """Times each optimizer step, and notes what it trained on; comes before all other callbacks."""

    leaves_traces = True

    def __init__(self, found: Measured, tell: Callable[[int], None]) -> None:
        self.found, self.tell = found, tell
        self._clock: list[Any] = []  # one mark a step, and one before
        self._cpu: list[float] = []
        self._pauses: list[tuple[int, Any, Any]] = []  # validations: after how many steps, from, to
        self._amounts: list[Any] = []
        self._losses: list[Any] = []
        self._window: list[tuple[Any, Any]] = []  # amounts and losses since the last step
        self._values: list[tuple[int, dict[str, float]]] = []
        self._known: set[str] = set()
        self._before = 0
        self._told = time.monotonic()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.trainable = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        self.found.parameters = sum(p.numel() for p in pl_module.parameters())
        self._before, self._device = trainer.global_step, trainer.strategy.root_device
        self.found.device = _name(self._device)
        self.mark()

    def mark(self) -> None:
        self._clock.append(_now(self._device))
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
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            self.tell(len(self._losses))

    def validate(self, trainer: Any, run: Callable[[], Any]) -> Any:
        """Run a validation within the fit, which is no part of the steps' time, and note what it logs."""
        start, before, after = _now(self._device), set(trainer.callback_metrics), len(self._losses)
        result = run()
        metrics = trainer.callback_metrics
        if not self._values:  # later on those of a training's epochs are new as well
            self._known = set(metrics) - before
        self._values.append((after, {name: float(metrics[name]) for name in self._known & set(metrics)}))
        self._pauses.append((after, start, _now(self._device)))
        return result

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
        if found.kinds and len(found.seconds) > _warm_up(asked) > 0:  # counting is no part of the time
            found.seconds[_warm_up(asked) - 1] = found.step_time
        for step, values in self._values:
            for name, value in values.items():
                found.held_out.setdefault(name, []).append((step, sum(found.seconds[:step]), value))


class _Last(Callback):
    """Tells :class:`_Steps` when all other callbacks are done, and saves the checkpoint that is weighed."""

    leaves_traces = True
    steps: _Steps
    saves: Path | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.stepped(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.saves is not None:
            trainer.save_checkpoint(self.saves, weights_only=False)
            files = [self.saves] if self.saves.is_file() else [one for one in self.saves.rglob("*") if one.is_file()]
            self.steps.found.checkpoint_bytes = sum(file.stat().st_size for file in files)


class _Bytes(StepMeter):
    """Counts the bytes of one step, those on an accelerator by its allocator's books."""

    leaves_traces = True

    def __init__(self, found: Measured, step: int) -> None:
        super().__init__()
        self.found, self.counted = found, max(0, step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """It begins later."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.counted and not self.steps and self.meter is None:
            device = trainer.strategy.root_device
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
        device = trainer.strategy.root_device
        if device.type != "cpu" and trainer.global_step == self.counted + 1:
            self.found.peak = self.found.peak or int(torch.accelerator.max_memory_allocated(device))
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

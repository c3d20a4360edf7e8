"""Trial steps: real training and validation steps of a fit that run before its first epoch and are undone.

    at the start of the first epoch:  record everything, then n times (run steps, restore everything), then train

At this point everything is as in training: weights and optimizer states are restored, the strategy has wrapped the
model, and ``on_train_start`` of all callbacks has been called. Nothing has been trained yet. Trial steps use the
trainer's own loop, so they include transforms, rewritten optimizers, precision, clipping and the hooks of all
callbacks. Objects that would leave traces outside the process are disabled: loggers, checkpoints, progress bars,
writers of files.
"""

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TextIO

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import distributed
from torch.utils.data import DataLoader

from lit_efficient.errors import ConfigurationError, OutOfMemoryError, is_out_of_memory
from lit_efficient.internals.lightning_data import combined_loader, validate_on
from lit_efficient.internals.lightning_loops import forget_restart
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import (
    call_callbacks,
    call_module,
    logger_connector,
    set_default_root_dir,
)
from lit_efficient.internals.torch_loaders import copied
from lit_efficient.internals.wraps import does_nothing, unwrap_method, wrap_method
from lit_efficient.mechanisms.rewind import Rewind, random_states
from lit_efficient.mechanisms.trials.memory import collected, release_frames
from lit_efficient.mechanisms.trials.probes import live_generators
from lit_efficient.surgery import reshard
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait, has_trait

# Names instead of classes, because Lightning's classes exist twice: in lightning.pytorch and in pytorch_lightning.
WRITERS = {"Checkpoint", "ProgressBar", "ModelSummary"}


class Trials:
    """Recorded state of a fit, from which trial steps are run.

    Args:
        trainer: Trainer at the start of its first epoch.
        idle: Names of callback classes that must not act in trials, in addition to loggers, checkpoints, progress bars
            and techniques that leave traces (:attr:`lit_efficient.traits.Trait.LEAVES_TRACES`).
    """

    def __init__(self, trainer: Any, idle: Iterable[str] = ()) -> None:
        self.trainer = trainer
        self._idle = {*idle}
        strategy, data = trainer.strategy, trainer.datamodule
        roots = [trainer.lightning_module, trainer.callbacks, strategy.optimizers, strategy.lr_scheduler_configs]
        roots += [trainer.fit_loop, logger_connector(trainer), trainer.state, strategy.precision_plugin]
        shallow = [trainer, strategy, *([data] if data is not None else [])]
        reshard(trainer.lightning_module)  # gathered parameters are temporary and must not be recorded
        self.record = Rewind(roots, shallow)

    @contextmanager
    def trial(self, accumulate: int = 1, alone: bool = True) -> Iterator[None]:
        """Context in which the trainer can run trial steps. Everything is restored afterwards.

        Args:
            accumulate: Number of micro-batches per optimizer step.
            alone: Run each process without the others, which is necessary where a process may run out of memory, and
                run techniques that save memory at random as if they saved none.
        """
        trainer, loop = self.trainer, self.trainer.fit_loop
        with collected(), quiet(), tempfile.TemporaryDirectory() as folder:
            try:
                trainer.callbacks = [callback for callback in trainer.callbacks if self._acts(callback)]
                trainer.loggers = [DummyLogger()] if trainer.loggers else []
                trainer.profiler = PassThroughProfiler()
                set_default_root_dir(trainer, folder)
                trainer.save_checkpoint = does_nothing
                trainer.accumulate_grad_batches = accumulate
                if alone:
                    for callback in trainer.callbacks:
                        if isinstance(callback, Technique):
                            callback.worst_case = True
                    self._step_alone()
                forget_restart(trainer)
                loop.max_batches = float("inf")
                loop.epoch_loop.batch_progress.current.reset()
                loop.epoch_loop.batch_progress.is_last_batch = False
                self._hook("on_train_epoch_start")
                yield
            finally:
                reshard(trainer.lightning_module)
                self.record.restore()

    def train(self, batch: Callable[[], object]) -> None:
        """Run one batch through the training loop, with the optimizer step if the batch completes its accumulation.

        Args:
            batch: Function that returns the batch.

        Raises:
            OutOfMemoryError: If this process or another one ran out of memory.
        """
        self._attempt(lambda: self.trainer.fit_loop.epoch_loop.advance(_Feed(batch)))

    def validate(self, batches: Sequence[Callable[[], object]]) -> None:
        """Run one batch of each validation loader through the validation loop.

        Args:
            batches: Functions that return the batches.

        Raises:
            OutOfMemoryError: If this process or another one ran out of memory.
        """
        self._attempt(lambda: self._validate(batches))

    def agree(self, own: float) -> float:
        """Return the smallest of the values of all processes."""
        if self.trainer.world_size == 1:
            return own
        value = torch.tensor(own, dtype=torch.float64, device=self.trainer.strategy.root_device)
        distributed.all_reduce(value, distributed.ReduceOp.MIN)
        return float(value)

    def finish(self) -> None:
        """Wrap the model in a new DDP wrapper if it had one, because the old one has processed trial steps."""
        strategy = self.trainer.strategy
        if self.trainer.world_size > 1 and traits_of(strategy).replicates:
            strategy.model = self.trainer.lightning_module
            strategy.configure_ddp()

    def _validate(self, batches: Sequence[Callable[[], object]]) -> None:
        trainer = self.trainer
        trainer.validating = True
        call_module(trainer, "on_validation_model_zero_grad")
        validate_on(trainer, CombinedLoader([_One(batch) for batch in batches], "sequential"), [1] * len(batches))
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    def _attempt(self, unit: Callable[[], None]) -> None:
        """Run a function on all processes, and raise on all of them if one ran out of memory."""
        complaint = ""
        try:
            unit()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            complaint = str(error).splitlines()[0]
            release_frames(error)
        if self.agree(0.0 if complaint else 1.0) < 1.0:
            raise OutOfMemoryError(complaint or "out of memory on another process")

    def _step_alone(self) -> None:
        """Disable collective operations: if one process ran out of memory, the others would wait for it forever."""
        strategy = self.trainer.strategy
        if self.trainer.world_size > 1 and traits_of(strategy).replicates:
            strategy.model = self.trainer.lightning_module
            strategy.reduce = _itself
            strategy.barrier = does_nothing

    def _acts(self, callback: object) -> bool:
        return not leaves_traces(callback) and not {base.__name__ for base in type(callback).__mro__} & self._idle

    def _hook(self, name: str) -> None:
        call_callbacks(self.trainer, name)
        call_module(self.trainer, name)


@contextmanager
def repeated_batches(trainer: Any, who: str) -> Iterator[Iterator[Any]]:
    """Context with an endless iterator of training batches that leaves the run's own loaders as they are.

    Args:
        trainer: The trainer.
        who: Name of the technique for the message.

    Raises:
        ConfigurationError: If the training loader yields no batches.
    """
    generators = [(generator, generator.get_state()) for generator in live_generators(combined_loader(trainer))]
    try:
        yield _repeated(trainer, who)
    finally:
        for generator, state in generators:
            generator.set_state(state)


def _repeated(trainer: Any, who: str) -> Iterator[Any]:
    combined = combined_loader(trainer)
    while True:
        copies = copy.copy(combined)
        copies.flattened = [copied(x) if isinstance(x, DataLoader) else copy.copy(x) for x in combined.flattened]
        copies.limits = None
        empty = True
        for batch, _, _ in copies:
            empty = False
            yield batch
        if empty:
            raise ConfigurationError(f"{who}: the training loader yields no batches")


def leaves_traces(callback: object) -> bool:
    """Return whether a callback has effects that :class:`Rewind` cannot undo, such as writing files."""
    names = {base.__name__ for base in type(callback).__mro__}
    return has_trait(callback, Trait.LEAVES_TRACES) or bool(names & WRITERS)


@contextmanager
def quiet(level: int = logging.INFO, warns: bool = True, prints: TextIO | None = None) -> Iterator[None]:
    """Context that suppresses messages about steps that are undone afterwards.

    Args:
        level: Highest logging level that is suppressed.
        warns: Let warnings pass.
        prints: Stream that replaces standard output. ``None`` leaves standard output as it is.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        with nullcontext() if prints is None else redirect_stdout(prints), warnings.catch_warnings():
            if not warns:
                warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Feed:
    """Replacement of Lightning's data fetcher that returns one batch and claims that more will follow."""

    done = False

    def __init__(self, batch: Callable[[], Any]) -> None:
        self._make = batch

    def __next__(self) -> tuple[object, int, int]:
        return self._make(), 0, 0


class _One:
    """Loader of one batch, which is created when iteration begins."""

    def __init__(self, batch: Callable[[], Any]) -> None:
        self._make = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._make()


def _itself(value: object, *_: object, **__: object) -> object:
    return value


class _Waiting:
    """Functions that a fit's loop will call, by the point at which it calls them."""

    def __init__(self) -> None:
        self.before_run: list[Callable[[dict[str, Any]], None]] = []
        self.before_epoch: list[tuple[int, Callable[[], None]]] = []


def schedule(
    trainer: Trainer, before_run: Callable[[dict[str, Any]], None], before_epoch: Callable[[], None], order: int
) -> None:
    """Schedule functions for two points of the coming fit for which Lightning has no hook. Call it in ``on_fit_start``.

    Args:
        trainer: The trainer.
        before_run: Called when everything is restored and no data is loaded yet, with the states of all generators.
        before_epoch: Called at the start of the first epoch, after all ``on_train_start`` hooks.
        order: Functions ``before_epoch`` are called in ascending order of this number.
    """
    loop = trainer.fit_loop
    waiting: _Waiting | None = loop.__dict__.get("_lit_efficient_waiting")
    if waiting is None:
        waiting = loop.__dict__["_lit_efficient_waiting"] = _Waiting()
        wrap_method(loop, "run", _run)
        wrap_method(loop, "on_advance_start", _on_advance_start)
    waiting.before_run.append(before_run)
    waiting.before_epoch.append((order, before_epoch))


def unschedule(trainer: Trainer) -> None:
    """Cancel the scheduled functions that have not been called."""
    loop = trainer.fit_loop
    loop.__dict__.pop("_lit_efficient_waiting", None)
    unwrap_method(loop, "run", _run)
    unwrap_method(loop, "on_advance_start", _on_advance_start)


def _run(self: Any) -> None:
    unwrap_method(self, "run", _run)
    states = random_states()
    for function in self.__dict__["_lit_efficient_waiting"].before_run:
        function(states)
    self.run()


def _on_advance_start(self: Any) -> None:
    waiting = self.__dict__.pop("_lit_efficient_waiting")
    unwrap_method(self, "on_advance_start", _on_advance_start)
    for _, function in sorted(waiting.before_epoch, key=lambda entry: entry[0]):
        function()
    self.on_advance_start()

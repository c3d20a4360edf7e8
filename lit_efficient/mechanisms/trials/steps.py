"""Steps that leave no trace: run real training and validation steps of a fit before its first epoch, and undo them.

    at the first epoch's start:  record everything, then n times (steps, put everything back), then go on

That is the one point at which all is as in training: weights and optimizer states are restored, the strategy has
wrapped the model, and every ``on_train_start`` has been called; and nothing has been trained. Steps go through the
trainer's own loop, so that transforms, rewritten optimizers, precision, clipping and the hooks of all callbacks take
part. What would leave a trace outside the process does not: loggers, checkpoints, progress bars, writers of files.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TextIO

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import distributed

from lit_efficient.errors import OutOfMemoryError, is_out_of_memory
from lit_efficient.internals.lightning_data import validate_on
from lit_efficient.internals.lightning_loops import forget_restart
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import (
    call_callbacks,
    call_module,
    logger_connector,
    set_default_root_dir,
)
from lit_efficient.internals.wraps import does_nothing, unwrap_method, wrap_method
from lit_efficient.mechanisms.rewind import Rewind, random_states
from lit_efficient.mechanisms.trials.memory import collected, release_frames
from lit_efficient.surgery import reshard
from lit_efficient.technique import Technique

# By name, because Lightning's classes exist twice: in lightning.pytorch and in pytorch_lightning.
WRITERS = {"Checkpoint", "ProgressBar", "ModelSummary"}


class Trials:
    """The record of a fit's state, and the means to run steps from it.

    Args:
        trainer: A trainer at the start of its first epoch.
        idle: Names of callback classes that must not act in trials, beside loggers, checkpoints, progress bars and
            those that leave traces (:attr:`lit_efficient.declaration.Declaration.leaves_traces`).
    """

    def __init__(self, trainer: Any, idle: Iterable[str] = ()) -> None:
        self.trainer = trainer
        self._idle = {*idle}
        strategy, data = trainer.strategy, trainer.datamodule
        roots = [trainer.lightning_module, trainer.callbacks, strategy.optimizers, strategy.lr_scheduler_configs]
        roots += [trainer.fit_loop, logger_connector(trainer), trainer.state, strategy.precision_plugin]
        shallow = [trainer, strategy, *([data] if data is not None else [])]
        reshard(trainer.lightning_module)  # what is gathered is no state
        self.record = Rewind(roots, shallow)

    @contextmanager
    def trial(self, accumulate: int = 1, alone: bool = True) -> Iterator[None]:
        """Prepare the trainer for steps that nobody is to notice, and put everything back afterwards.

        ``alone``: each process steps without the others, as it must where one may run out of memory, and techniques
        that spare memory by chance do not.
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
                for callback in trainer.callbacks if alone else ():
                    if isinstance(callback, Technique):
                        callback.worst_case = True
                if alone:
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

    def train(self, batch: Callable[[], Any]) -> None:
        """Run one batch through the training loop: hooks, forward, backward and, at a window's end, the optimizer.

        Raises:
            OutOfMemoryError: If memory ran out, on this process or on another one.
        """
        self._attempt(lambda: self.trainer.fit_loop.epoch_loop.advance(_Feed(batch)))

    def validate(self, batches: Sequence[Callable[[], Any]]) -> None:
        """Run one batch of each validation loader through the validation loop.

        Raises:
            OutOfMemoryError: If memory ran out, on this process or on another one.
        """
        self._attempt(lambda: self._validate(batches))

    def agree(self, own: float) -> float:
        """The smallest of all processes' values."""
        if self.trainer.world_size == 1:
            return own
        value = torch.tensor(own, dtype=torch.float64, device=self.trainer.strategy.root_device)
        distributed.all_reduce(value, distributed.ReduceOp.MIN)
        return float(value)

    def finish(self) -> None:
        """Wrap the model for several processes again, if it was: the old wrapper has seen backward passes of trials."""
        strategy = self.trainer.strategy
        if self.trainer.world_size > 1 and traits_of(strategy).replicates:
            strategy.model = self.trainer.lightning_module
            strategy.configure_ddp()

    def _validate(self, batches: Sequence[Callable[[], Any]]) -> None:
        trainer = self.trainer
        trainer.validating = True
        call_module(trainer, "on_validation_model_zero_grad")
        validate_on(trainer, CombinedLoader([_One(batch) for batch in batches], "sequential"), [1] * len(batches))
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    def _attempt(self, unit: Callable[[], None]) -> None:
        """Run a unit on all processes, and let all of them know whether one has run out of memory."""
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
        """Leave out what processes do together: where one runs out of memory the others would wait for it for ever."""
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


def leaves_traces(callback: object) -> bool:
    """Whether a callback writes, draws or stops outside of what :class:`Rewind` puts back."""
    names = {base.__name__ for base in type(callback).__mro__}
    return bool(getattr(callback, "leaves_traces", False) or names & WRITERS)


@contextmanager
def quiet(level: int = logging.INFO, warns: bool = True, prints: TextIO | None = None) -> Iterator[None]:
    """Say nothing of what is undone afterwards (that a layer thaws, that a size was found): log up to a level, warn."""
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
    """Stands in for Lightning's data fetcher: one batch, and more to come."""

    done = False

    def __init__(self, batch: Callable[[], Any]) -> None:
        self._make = batch

    def __next__(self) -> tuple[Any, int, int]:
        return self._make(), 0, 0


class _One:
    """A loader of one batch, which is made when it is asked for."""

    def __init__(self, batch: Callable[[], Any]) -> None:
        self._make = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._make()


def _itself(value: Any, *_: Any, **__: Any) -> Any:
    return value


class _Waiting:
    """What a fit's loop has still to call, by the point at which it does."""

    def __init__(self) -> None:
        self.before_run: list[Callable[[dict[str, Any]], None]] = []
        self.before_epoch: list[tuple[int, Callable[[], None]]] = []


def schedule(
    trainer: Any, before_run: Callable[[dict[str, Any]], None], before_epoch: Callable[[], None], order: int
) -> None:
    """Call functions at two points of the coming fit that no hook of Lightning has; for ``on_fit_start``.

    ``before_run`` is called when everything is restored and no data is loaded yet, with the states of all generators,
    ``before_epoch`` at the first epoch's start, after every ``on_train_start``, the smaller its order the earlier.
    """
    loop = trainer.fit_loop
    waiting: _Waiting | None = loop.__dict__.get("_lit_efficient_waiting")
    if waiting is None:
        waiting = loop.__dict__["_lit_efficient_waiting"] = _Waiting()
        wrap_method(loop, "run", _run)
        wrap_method(loop, "on_advance_start", _on_advance_start)
    waiting.before_run.append(before_run)
    waiting.before_epoch.append((order, before_epoch))


def unschedule(trainer: Any) -> None:
    """Forget what has not been called."""
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

"""Checkpoints on signals: on SIGTERM, SIGINT, SIGUSR1 or SIGHUP save within one optimizer step, and exit with 128 + n.

    signal n -> a flag -> end of the present optimizer step -> full checkpoint -> SystemExit(128 + n)

Saves: the work since the last checkpoint if a cluster preempts the run, a container stops, a connection breaks or
    a user presses Ctrl-C
Costs: nothing with one process; with several one all-reduce of an integer between CPUs per optimizer step
Source: the convention 128 + n of POSIX shells; Lightning itself only handles SIGTERM, and saves nothing

The all-reduce is needed because all processes must save in the same step, but a signal may reach only one process, or
two processes in different steps. It does not wait for a GPU, unlike the broadcast that Lightning makes in each batch.
SIGTERM kills the workers of data loaders, and then the step fails: send it to the main process, not to its group.
"""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import distributed

from lit_efficient.distributed.shards import is_deepspeeds
from lit_efficient.errors import ChecksTypes, refusal
from lit_efficient.files.background import finish_writing
from lit_efficient.internals.lightning_loops import accumulates
from lit_efficient.internals.lightning_trainer import TrainerOnly, log_step, original_handlers, signal_connector
from lit_efficient.traits import Trait


class SignalCheckpoint(Callback, ChecksTypes, TrainerOnly):
    """On a signal n, save a full checkpoint within one optimizer step, print its path, and exit with code 128 + n.

    The checkpoint is saved at the end of an accumulation window. During validation it is saved after the current batch,
    or with several processes after the validation and the next step. If a validation is due at the step of the
    checkpoint, Lightning skips it in the resumed run. Before training has begun there is nothing to save, and the run
    ends immediately, or with several processes after the first step. A second SIGINT exits immediately. Other signal
    handlers of the user are also called. Lightning handles the signals of automatic requeueing under SLURM. SIGHUP
    stays ignored under nohup.

    Args:
        signals: Names of the signals to handle.
        dirpath: Folder of the checkpoint ``interrupted-step=N.ckpt``. ``None``: the folder of the first
            ``ModelCheckpoint``, or else ``checkpoints`` in the trainer's root folder.

    Raises:
        ConfigurationError: If a name is not that of a signal that can be handled.
    """

    traits = frozenset({Trait.LEAVES_TRACES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (3, "a signal or Ctrl-C saves within one step, then ends the run")
    }

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"),
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        forbidden = {"SIGKILL", "SIGSTOP"}
        self.signals = signals
        self.dirpath = dirpath
        for name in self._names():
            if name in forbidden or (name not in signal.Signals.__members__ and sys.platform != "win32"):
                allowed = "names of signals that can be handled, like SIGTERM, SIGINT, SIGUSR1"
                raise refusal("SignalCheckpoint", "signals", allowed, name)
        self._numbers = [signal.Signals[name] for name in self._names() if name in signal.Signals.__members__]
        # Changed in place, so that it survives trials before the first step, which restore all attributes.
        self._received = bytearray()  # numbers of the signals
        self._early = False  # True before training, if there is only one process
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}  # handlers to restore; empty if none of this callback is installed
        self._listens = False  # True if handlers of all signals are installed
        self._own_handlers: dict[int, list[Callable[[int, FrameType | None], object]]] = {}
        self._group: Any = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Move to the end of the callbacks, so that a checkpoint contains what all others have done in the step."""
        if stage == "fit":
            # A new list, because the trainer is iterating over the old one.
            trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install handlers, except for signals whose handlers Lightning installs after this hook."""
        self._install(trainer, later={signal.SIGTERM, *_requeue_signals(trainer)})

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)
        if trainer.world_size > 1 and self._group is None:
            self._group = distributed.new_group(backend="gloo")  # between CPUs, so that no process waits for a GPU

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._early = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not (pl_module.automatic_optimization and accumulates(trainer)):
            self._save_and_exit(trainer, stepped=True)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._previous and trainer.world_size == 1:
            self._save_and_exit(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_and_exit(trainer)
        self._uninstall(trainer)
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._uninstall(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._early and self._received and self._previous:
            name = signal.Signals(self._received[0]).name
            _print(trainer, f"Interrupted by {name} before training began. There is nothing to save.")
        self._uninstall(trainer)
        self._group = None

    def _names(self) -> list[str]:
        if isinstance(self.signals, str):
            return [self.signals]
        return list(self.signals)

    def _save_and_exit(self, trainer: Trainer, stepped: bool = False) -> None:
        """Save a checkpoint and exit if any process has received a signal. ``stepped``: a step has just ended."""
        number = self._agreed()
        if not number:
            return
        if not self._early:
            name = signal.Signals(number).name
            path = self._folder(trainer) / f"interrupted-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path, weights_only=False)  # a collective
            finish_writing()
            if stepped:
                log_step(trainer)  # the resumed run begins with the next step
            _print(trainer, f"Interrupted by {name}: the checkpoint is {path}")
            if not is_deepspeeds(path):
                _print(trainer, f"Resume with: --ckpt_path {shlex.quote(str(path))}")
        if _is_watched_child(trainer):
            raise SystemExit(0)
        raise SystemExit(128 + number)

    def _agreed(self) -> int:
        """Return the number of a signal that any process has received, or 0."""
        received = next(iter(self._received), 0)
        if self._group is None:
            return received
        # All processes take part in each step, with or without a signal, because a collective needs all of them.
        flag = torch.tensor([received])
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def _folder(self, trainer: Trainer) -> Path:
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        default = Path(trainer.default_root_dir) / "checkpoints"
        folder = self.dirpath or next(filter(None, folders), default)
        return Path(trainer.strategy.broadcast(str(folder)))

    def _install(self, trainer: Trainer, later: Set[int] = frozenset()) -> None:
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            if not later:
                rank_zero_warn(
                    "SignalCheckpoint: fit runs outside of the main thread, where signals cannot be handled, so none "
                    "saves a checkpoint. Call fit in the main thread"
                )
            return
        if not self._previous:
            self._process = os.getpid()
            self._early = trainer.world_size == 1
            self._received.clear()
        self._listens = not later
        taken = _requeue_signals(trainer)
        for number in self._numbers:
            if number in later or number in self._previous:
                continue
            if number in taken:
                rank_zero_info(
                    f"SignalCheckpoint: Lightning handles {number.name} for automatic requeueing under SLURM"
                )
                continue
            previous = signal.getsignal(number)
            if number.name == "SIGHUP" and previous == signal.SIG_IGN:  # the run was started with nohup
                continue
            self._own_handlers[number] = _handlers_of_the_user(previous, trainer)
            if previous is None:  # a handler that was not installed from Python cannot be restored
                previous = signal.SIG_DFL
            self._previous[number] = previous
            signal.signal(number, self._on_signal)
        if self._early and signal.SIGTERM in self._previous and signal_connector(trainer).received_sigterm:
            self._on_signal(signal.SIGTERM, None)  # Lightning has received it already, and would exit with 0

    def _uninstall(self, trainer: Trainer) -> None:
        by_lightning = original_handlers(trainer)  # Lightning restores these, which may be handlers of this callback
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
            if by_lightning.get(number) == self._on_signal:
                by_lightning[number] = previous
        self._previous = {}
        self._own_handlers = {}
        self._listens = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked worker of a data loader: Ctrl-C reaches the whole group, but the step needs its data
        for handler in self._own_handlers.get(number, []):
            handler(number, frame)
        again = number == signal.SIGINT and self._received[:1] == bytes([number])
        self._received.append(number)
        if again and self._received.count(number) > 2:  # the exception of the second SIGINT did not end the process
            os._exit(128 + number)
        if again or self._early:
            raise SystemExit(128 + number)


def _handlers_of_the_user(handler: object, trainer: Trainer) -> list[Callable[[int, FrameType | None], object]]:
    """Return the handlers that users have installed, without Python's default handlers and Lightning's notifier.

    The notifier broadcasts from inside the signal handler, so processes that are in another collective would hang.
    """
    connector = signal_connector(trainer)
    chosen = []
    for one in getattr(handler, "signal_handlers", [handler]):
        default = not callable(one) or one is signal.default_int_handler
        if not default and getattr(one, "__self__", None) is not connector:
            chosen.append(one)
    return chosen


def _requeue_signals(trainer: Trainer) -> set[int]:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and _is_a("SLURMEnvironment", environment) and environment.auto_requeue:
        return {signal.SIGTERM, environment.requeue_signal or signal.SIGUSR1}
    return set()


def _is_watched_child(trainer: Trainer) -> bool:
    """Return whether Lightning launched this process, and kills the main one if a child exits with a code above 0."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return _is_a("LightningEnvironment", environment) and trainer.local_rank != 0


def _is_a(name: str, value: object) -> bool:
    # By name, because the package pytorch_lightning has classes with the same names.
    return any(base.__name__ == name for base in type(value).__mro__)


def _print(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print(text, flush=True)

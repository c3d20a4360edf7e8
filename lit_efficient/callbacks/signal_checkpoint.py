"""Signals become checkpoints: SIGTERM, SIGINT, SIGUSR1 or SIGHUP save within one optimizer step, exit with 128 + n.

    signal -> a flag -> the end of the optimizer step under way -> full checkpoint -> SystemExit(128 + n)

Saves: the work since the last checkpoint when a cluster preempts the run, a container stops, a connection breaks or
somebody types Ctrl-C.
Costs: nothing a step on one process. On several, one all-reduce of an integer between the CPUs an optimizer step.
Source: POSIX's convention of 128 + n; Lightning's own connector knows SIGTERM only and saves nothing.

The all-reduce is needed because a signal may reach one process only, or two of them in different steps, while all must
save at the same one. It does not wait for a GPU; Lightning's own broadcast, in each batch, does.
Loader workers that are sent SIGTERM die of it, and the step with them: signal the main process, not its group.
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
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import distributed

from lit_efficient.distributed.shards import is_deepspeeds
from lit_efficient.errors import refusal
from lit_efficient.internals.lightning_loops import accumulates
from lit_efficient.internals.lightning_trainer import log_step, original_handlers, signal_connector
from lit_efficient.traits import Trait


class SignalCheckpoint(Callback):
    """On a signal: save a full checkpoint within one optimizer step, say where it lies, exit with code 128 + n.

    A signal in an accumulation window is answered at the window's end; one in a validation run after the current batch,
    or on several processes after the run and the next step. A validation that is due at the very step of the checkpoint
    is skipped by Lightning when the run is resumed. Before training has begun there is nothing to save, and it ends
    at once; several processes end after the first step. A second SIGINT exits at once. Handlers of your own are called
    too; signals of SLURM's automatic requeueing stay Lightning's. SIGHUP stays ignored under nohup.

    Args:
        signals: Names of the signals to answer.
        dirpath: Folder of the checkpoint ``interrupted-step=N.ckpt``. ``None``: that of the first ``ModelCheckpoint``,
            else ``checkpoints`` in the trainer's root folder.

    Raises:
        ConfigurationError: If a name is no signal that can be handled.
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
        for name in [signals] if isinstance(signals, str) else signals:
            if name in forbidden or (name not in signal.Signals.__members__ and sys.platform != "win32"):
                allowed = "names of signals that can be handled, like SIGTERM, SIGINT, SIGUSR1"
                raise refusal("SignalCheckpoint", "signals", allowed, name)
        self.signals = signals
        self.dirpath = dirpath
        self._numbers = [signal.Signals[name] for name in self._names() if name in signal.Signals.__members__]
        self._received = bytearray()  # which trials before the first step, that put all attributes back, leave alone
        self._early = False  # nothing has been trained, and nobody else waits for this process
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}  # handlers to put back; empty while none of ours is installed
        self._listens = False  # to all of them
        self._own_handlers: dict[int, list[Callable[[int, FrameType | None], Any]]] = {}
        self._group: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Become the last callback: a checkpoint holds what all others have done in the step."""
        if stage == "fit":
            # A new list, because the trainer is iterating over the old one.
            trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to listen, but for what Lightning takes after this hook, and we after it."""
        self._install(trainer, later={signal.SIGTERM, *_requeue_signals(trainer)})

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)
        if trainer.world_size > 1 and self._group is None:
            self._group = distributed.new_group(backend="gloo")  # between CPUs: nobody waits for a GPU

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._early = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not (pl_module.automatic_optimization and accumulates(trainer)):
            self._answer(trainer, stepped=True)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._previous and trainer.world_size == 1:
            self._answer(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._answer(trainer)
        self._uninstall(trainer)
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._uninstall(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._early and self._received and self._previous:
            name = signal.Signals(self._received[0]).name
            _print(trainer, f"Interrupted by {name} before training began: there is nothing to save.")
        self._uninstall(trainer)
        self._group = None

    def _names(self) -> list[str]:
        return [self.signals] if isinstance(self.signals, str) else list(self.signals)

    def _answer(self, trainer: Any, stepped: bool = False) -> None:
        number = self._agreed()
        if not number:
            return
        if not self._early:
            name = signal.Signals(number).name
            path = self._folder(trainer) / f"interrupted-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path, weights_only=False)  # all processes together, until it is there
            if stepped:
                log_step(trainer)  # the resumed run begins with the next one
            _print(trainer, f"Interrupted by {name}: the checkpoint is {path}")
            if not is_deepspeeds(path):
                _print(trainer, f"Resume with: --ckpt_path {shlex.quote(str(path))}")
        raise SystemExit(0 if _is_watched_child(trainer) else 128 + number)

    def _agreed(self) -> int:
        """The signal that any process has received, or 0."""
        received = next(iter(self._received), 0)
        if self._group is None:
            return received
        flag = torch.tensor([received])
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def _folder(self, trainer: Any) -> Path:
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        folder = self.dirpath or next(filter(None, folders), None) or Path(trainer.default_root_dir) / "checkpoints"
        return Path(trainer.strategy.broadcast(str(folder)))

    def _install(self, trainer: Any, later: Set[int] = frozenset()) -> None:
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            if not later:
                text = "signals can only be handled in the main thread; this run ignores them"
                rank_zero_warn(f"SignalCheckpoint: {text}")
            return
        if not self._previous:
            self._process, self._early = os.getpid(), trainer.world_size == 1
            self._received.clear()
        self._listens = not later
        taken = _requeue_signals(trainer)
        for number in self._numbers:
            if number in later or number in self._previous:
                continue
            if number in taken:
                rank_zero_info(
                    f"SignalCheckpoint: {number.name} is left to Lightning's automatic requeueing under SLURM"
                )
                continue
            previous = signal.getsignal(number)
            if number.name == "SIGHUP" and previous == signal.SIG_IGN:
                continue
            self._own_handlers[number] = _handlers_of_the_user(previous, trainer)
            self._previous[number] = signal.SIG_DFL if previous is None else previous
            signal.signal(number, self._on_signal)
        if self._early and signal.SIGTERM in self._previous and signal_connector(trainer).received_sigterm:
            self._on_signal(signal.SIGTERM, None)  # Lightning has noted it, and would end with 0

    def _uninstall(self, trainer: Any) -> None:
        by_lightning = original_handlers(trainer)  # it puts back what was there after our first turn
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
            if by_lightning.get(number) == self._on_signal:
                by_lightning[number] = previous
        self._previous, self._own_handlers, self._listens = {}, {}, False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked loader worker: Ctrl-C reaches the whole group, and the step still needs its data
        for handler in self._own_handlers.get(number, []):
            handler(number, frame)
        again = number == signal.SIGINT and self._received[:1] == bytes([number])
        self._received.append(number)
        if again and self._received.count(number) > 2:
            os._exit(128 + number)
        if again or self._early:
            raise SystemExit(128 + number)


def _handlers_of_the_user(handler: Any, trainer: Any) -> list[Callable[[int, FrameType | None], Any]]:
    """What somebody installed on purpose; neither Python's defaults nor Lightning's notifier.

    The notifier broadcasts from inside the signal handler, which hangs processes that are in another collective.
    """
    handlers = getattr(handler, "signal_handlers", [handler])
    connector = signal_connector(trainer)
    return [
        one
        for one in handlers
        if callable(one) and one is not signal.default_int_handler and getattr(one, "__self__", None) is not connector
    ]


def _requeue_signals(trainer: Any) -> set[int]:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and _is_a("SLURMEnvironment", environment) and environment.auto_requeue:
        return {signal.SIGTERM, environment.requeue_signal or signal.SIGUSR1}
    return set()


def _is_watched_child(trainer: Any) -> bool:
    """Whether Lightning launched this process: it kills the main one if a child ends with a code other than 0."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return _is_a("LightningEnvironment", environment) and trainer.local_rank != 0


def _is_a(name: str, value: object) -> bool:
    # By name, because the standalone pytorch_lightning has classes of its own.
    return any(base.__name__ == name for base in type(value).__mro__)


def _print(trainer: Any, text: str) -> None:
    if trainer.is_global_zero:
        print(text, flush=True)

"""Rank watch: if a process fails or leaves training, the others end within a minute and report the process and reason.

    another process raises, is killed or loses its machine  -> this process ends within ``failed`` seconds
    another process ends its training, this one trains      -> this process ends within ``left`` seconds
    another process has fewer batches in its epoch          -> the same, because their collectives would not match
    another process calls ``trainer.save_checkpoint`` alone -> the same
    this process receives SIGTERM  -> it exits with code 143, and the others end within ``failed`` seconds

Saves: the minutes or days that other processes would wait in a collective, and the search for the process that failed
Costs: a connection of each process to the first one, and a sleeping thread
Source: no paper; timeouts of torch.distributed also end a wait, after 10 or 30 minutes and without naming the process

A process that is only slow is waited for, at most for the ``timeout`` of the strategy. This callback replaces
Lightning's handler of SIGTERM, whose broadcast the other processes do not expect.
"""

import os
import sys
import threading
import traceback
from types import FrameType
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import distributed

from lit_efficient.distributed.rank_line import DONE, ENDED, FAILED, LEFT, RankLine
from lit_efficient.distributed.ranks import check_batches
from lit_efficient.errors import ChecksTypes, check_number
from lit_efficient.internals.lightning_trainer import TrainerOnly, answer_sigterm, leave_sigterm
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.traits import Trait

_EXIT_CODE = 2
_LAST = "its epoch ends after "  # beginning of a reason that receivers recognise
_UNWATCHED = "another process has ended, or does not answer; its last output gives the reason"


class RankWatch(Callback, ChecksTypes, TrainerOnly):
    """With several processes, end this one with an error message if another one has failed or has left training early.

    Processes are watched from ``setup`` of the callbacks on. If this process raises an error because of another one,
    the error gets a note with the reason.

    Args:
        failed: Seconds after which this process is ended if another one has failed, above 0. It may end itself before.
        left: Seconds after which this process is ended if another one has left training and this one has not, above 0.

    Raises:
        ConfigurationError: If an argument is not above 0.
    """

    traits = frozenset({Trait.LEAVES_TRACES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (5, "with several processes, none waits for a failed one, and each names it")
    }

    def __init__(self, failed: float = 10.0, left: float = 45.0) -> None:
        check_number("RankWatch", "failed", failed, above=0)
        check_number("RankWatch", "left", left, above=0)
        self.failed = failed
        self.left = left
        self._line: RankLine | None = None
        self._timers: list[threading.Timer] = []
        self._failure_heard = threading.Event()
        self._reason = ""  # why this process would wait forever
        self._signal = ""  # set if this process has received SIGTERM
        self._begun = 0  # number of training batches that this process has begun
        self._places: list[int] = []  # that number each time that this process has left training
        self._left: list[tuple[str, int, int]] = []  # reports of others that left: reason, how often, batches begun

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and self._line is None and distributed.is_initialized():
            # The first callback, so that it reports the end of training before others wait in their hooks.
            trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
            self._reason = ""
            self._signal = ""
            self._begun = 0
            self._places = []
            self._left = []
            self._failure_heard.clear()
            host = trainer.strategy.cluster_environment.main_address
            answer_sigterm(trainer, _end_by_sigterm)
            wrap_method(trainer, "save_checkpoint", _save_checkpoint)
            try:
                self._line = RankLine(self._heard, host)
            except ConnectionError as error:
                rank_zero_warn(
                    f"RankWatch: process 0 cannot be reached at {host} ({error}): no process is watched. If one "
                    "fails, the others wait for the timeout of the strategy"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_batches(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begun += 1
        if trainer.is_last_batch:
            self._leave(self._begun, f"{_LAST}{self._begun} batches")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._leave(self._begun, f"it validates after {self._begun} batches")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(-1, f"it ended its training after {trainer.global_step} steps")

    def _leave(self, begun: int, why: str) -> None:
        """Report that this process leaves training for other work, after ``begun`` batches."""
        self._places.append(begun)
        if self._line is not None:
            self._line.say(LEFT, f"{len(self._places)} {begun} {why}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._line is not None:
            self._line.say(DONE)
        leave_sigterm(trainer, _end_by_sigterm)
        self._hang_up()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        leave_sigterm(trainer, _end_by_sigterm)
        if self._line is None:
            if isinstance(exception, RuntimeError) and trainer.world_size > 1 and _is_collectives(exception):
                exception.add_note(ENDED + _UNWATCHED)  # before ``setup``, for example while data are prepared
            return
        if isinstance(exception, RuntimeError):
            # A collective raises as soon as a connection closes. The report of the failure may arrive a little later.
            self._failure_heard.wait(2)
            apart = [why for why, left, begun in self._left if self._place(left) != begun]
            if apart and not self._reason and _is_collectives(exception):
                self._reason = apart[0]
        if self._reason and not isinstance(exception, SystemExit):  # after a signal all processes may exit together
            exception.add_note(ENDED + self._reason)
        self._line.say(FAILED, self._signal or f"{type(exception).__name__}: {exception}")
        self._hang_up()

    def _hang_up(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._line is not None:
            self._line.close()
        self._line = None
        self._timers = []

    def _heard(self, rank: int, how: str, why: str) -> None:
        """Start a timer that ends this process after a report of another one. Runs in the connection's thread."""
        if how == DONE:
            return
        if how == FAILED:
            if not self._reason:
                self._reason = f"process {rank} has failed ({why})"
                self._failure_heard.set()
            timer = threading.Timer(self.failed, self._end, (f"process {rank} has failed ({why})",))
        else:
            left, begun, why = why.split(" ", 2)
            self._left.append((f"process {rank} has left training ({why})", int(left), int(begun)))
            timer = threading.Timer(self.left, self._end, self._left[-1])
        timer.daemon = True  # a timer must not keep a finished process alive
        self._timers.append(timer)
        timer.start()

    def _place(self, left: int) -> int | None:
        """Return after how many batches this process left training for the ``left``-th time, or ``None``."""
        if left > len(self._places):
            return None
        return self._places[left - 1]

    def _end(self, why: str, left: int | None = None, begun: int = 0) -> None:
        """End this process, from the thread of a timer: nothing else ends a collective in the main thread.

        The process continues if it has left training at the same batch as the other one, or may still do so.

        Args:
            why: Reason, for the error message.
            left: How often the other process has left training. ``None``: it has failed.
            begun: Number of batches that it had begun.
        """
        if self._line is None:
            return
        if left is not None:
            own = self._place(left)
            # A slow process has begun fewer batches, and may still leave at the same place. The end of an epoch is
            # reported when its last batch begins: the other process still takes part in the collectives of that batch.
            if _LAST in why:
                behind = self._begun < begun
            else:
                behind = self._begun <= begun and not _in_collective()
            if own == begun or (own is None and behind):
                return
        print(f"error: {ENDED}{why}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)


def _save_checkpoint(self: Any, *arguments: object, **named: object) -> None:
    """Wrap of ``trainer.save_checkpoint`` that reports the call, because all processes wait for each other in it."""
    for one in self.callbacks:
        if isinstance(one, RankWatch):
            one._leave(one._begun, f"it saves a checkpoint after {one._begun} batches, for which all are needed")
    inner_method(self, "save_checkpoint", _save_checkpoint)(*arguments, **named)


def _end_by_sigterm(self: Any, number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM instead of Lightning's notifier. ``self`` is Lightning's signal connector."""
    if self.trainer.strategy.launcher is not None:
        self.trainer.strategy.launcher.kill(number)  # child processes that Lightning has started
    for one in self.trainer.callbacks:
        if isinstance(one, RankWatch):
            one._signal = "it was sent SIGTERM"
    raise SystemExit(128 + number)


def _is_collectives(error: RuntimeError) -> bool:
    """Return whether an error comes from a collective."""
    # Errors of gloo have no class of their own.
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def _in_collective() -> bool:
    """Return whether the main thread is in a collective, according to its stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return any("distributed_c10d" in each.f_code.co_filename for each, _ in traceback.walk_stack(frame))

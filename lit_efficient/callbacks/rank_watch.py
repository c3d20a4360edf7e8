"""Processes that wait for one that will never come end within a minute, with a sentence that says which, and why.

    another one raises, is killed or loses its machine -> this one ends within `failed` seconds
    another one ends its training while this one trains -> this one ends within `left` seconds
    another one has fewer batches in its epoch          -> the same: what they send would meet the wrong thing
    another one calls ``trainer.save_checkpoint`` alone -> the same
    this one is sent SIGTERM, which nobody else answers -> it exits with 143, and the others end within `failed` seconds

Saves: the half hour, or the days, that the others of a run would wait in a collective, and the search for who began it.
Costs: a connection of each process to the first one, and a thread that sleeps.
Source: no paper; the timeouts of torch.distributed end a wait, too: after 10 or 30 minutes, without saying for whom.

A process that lives and is slow is waited for, as before: the strategy's `timeout` says how long. Lightning answers
SIGTERM by a broadcast that the other processes do not expect.
"""

import os
import sys
import threading
import traceback
from typing import Any, ClassVar

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import distributed

from lit_efficient.distributed.rank_line import DONE, ENDED, FAILED, LEFT, RankLine
from lit_efficient.distributed.ranks import check_batches
from lit_efficient.errors import check_number
from lit_efficient.internals.lightning_trainer import answer_sigterm, leave_sigterm
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.traits import Trait

_EXIT_CODE = 2
_LAST = "its epoch ends after "
_UNWATCHED = "another process has ended, or does not answer; what it printed last says why"


class RankWatch(Callback):
    """On several processes: end this one with a sentence where another has failed, or has ended its training earlier.

    It begins with the callbacks' ``setup``. A process that fails by itself because of another one says so, too.

    Args:
        failed: Seconds that this process has to end by itself once another has failed, above 0.
        left: Seconds that it has to end its training once another has ended its own, above 0.

    Raises:
        ConfigurationError: If an argument is not above 0.
    """

    traits = frozenset({Trait.LEAVES_TRACES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (5, "several processes: none waits for one that has failed, and each says which it was")
    }

    def __init__(self, failed: float = 10.0, left: float = 45.0) -> None:
        check_number("RankWatch", "failed", failed, above=0)
        check_number("RankWatch", "left", left, above=0)
        self.failed = failed
        self.left = left
        self._line: RankLine | None = None
        self._timers: list[threading.Timer] = []
        self._said = threading.Event()
        self._why = ""  # this process will wait for ever
        self._signal = ""  # it has been sent one
        self._begun = 0  # batches of training
        self._places: list[int] = []  # the number of them each time that this process left off training
        self._left: list[tuple[str, int, int]] = []  # what others said when they did

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.world_size > 1 and self._line is None and distributed.is_initialized():
            trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]  # the first to leave
            self._why, self._signal, self._begun, self._places, self._left = "", "", 0, [], []
            self._said.clear()
            host = trainer.strategy.cluster_environment.main_address
            answer_sigterm(trainer, _end_by_sigterm)
            wrap_method(trainer, "save_checkpoint", _save_checkpoint)
            try:
                self._line = RankLine(self._heard, host)
            except ConnectionError as error:
                rank_zero_warn(
                    f"RankWatch: process 0 cannot be reached at {host} ({error}): no process is watched, and the "
                    "strategy's timeout ends a wait"
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_batches(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begun += 1
        if trainer.is_last_batch:
            self._leave(self._begun, f"{_LAST}{self._begun} batches")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._leave(self._begun, f"it validates after {self._begun} batches")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(-1, f"it ended its training after {trainer.global_step} steps")

    def _leave(self, begun: int, why: str) -> None:
        self._places.append(begun)
        if self._line is not None:
            self._line.say(LEFT, f"{len(self._places)} {begun} {why}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._line is not None:
            self._line.say(DONE)
        leave_sigterm(trainer, _end_by_sigterm)
        self._hang_up()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        leave_sigterm(trainer, _end_by_sigterm)
        if self._line is None:
            if isinstance(exception, RuntimeError) and trainer.world_size > 1 and _is_collectives(exception):
                exception.add_note(ENDED + _UNWATCHED)  # before `setup`: while the data are prepared
            return
        if isinstance(exception, RuntimeError):  # which a collective raises at once where the other end is closed
            self._said.wait(2)
            apart = [why for why, left, begun in self._left if self._place(left) != begun]
            if apart and not self._why and _is_collectives(exception):
                self._why = apart[0]
        if self._why and not isinstance(exception, SystemExit):  # by which all may end together, after a signal
            exception.add_note(ENDED + self._why)
        self._line.say(FAILED, self._signal or f"{type(exception).__name__}: {exception}")
        self._hang_up()

    def _hang_up(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._line is not None:
            self._line.close()
        self._line, self._timers = None, []

    def _heard(self, rank: int, how: str, why: str) -> None:
        if how == FAILED and not self._why:
            self._why = f"process {rank} has failed ({why})"
            self._said.set()
        if how == DONE:
            return
        if how == FAILED:
            timer = threading.Timer(self.failed, self._end, (f"process {rank} has failed ({why})",))
        else:
            left, begun, why = why.split(" ", 2)
            self._left.append((f"process {rank} has left training ({why})", int(left), int(begun)))
            timer = threading.Timer(self.left, self._end, self._left[-1])
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _place(self, left: int) -> int | None:
        """After how many batches this one left off training for the ``left``-th time, if it has."""
        return self._places[left - 1] if left <= len(self._places) else None

    def _end(self, why: str, left: int | None = None, begun: int = 0) -> None:
        """In the timer's thread: the main one is in a collective, which nothing else would end.

        Not where this one has left off training at the same batch, or may still do so.
        """
        if self._line is None:
            return
        if left is not None:
            own = self._place(left)
            # One that is slow has begun fewer; who ends an epoch here waits for its last gradients, and not for others.
            behind = self._begun < begun if _LAST in why else self._begun <= begun and not _in_collective()
            if own == begun or (own is None and behind):
                return
        print(f"error: {ENDED}{why}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)


def _save_checkpoint(self: Any, *arguments: Any, **named: Any) -> None:
    """In the place of the trainer's method, at whose end all processes wait; without others nothing else happens."""
    for one in self.callbacks:
        if isinstance(one, RankWatch):
            one._leave(one._begun, f"it saves a checkpoint after {one._begun} batches, for which all are needed")
    inner_method(self, "save_checkpoint", _save_checkpoint)(*arguments, **named)


def _end_by_sigterm(self: Any, number: int, frame: Any) -> None:
    """In the place of Lightning's notifier, of which ``self`` is the owner."""
    if self.trainer.strategy.launcher is not None:
        self.trainer.strategy.launcher.kill(number)  # of processes that Lightning has started
    for one in self.trainer.callbacks:
        if isinstance(one, RankWatch):
            one._signal = "it was sent SIGTERM"
    raise SystemExit(128 + number)


def _is_collectives(error: RuntimeError) -> bool:
    """Whether another process's end closed the connection: of gloo's errors only the text is theirs."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def _in_collective() -> bool:
    """Whether the main thread waits for other processes, by what it calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return any("distributed_c10d" in each.f_code.co_filename for each, _ in traceback.walk_stack(frame))

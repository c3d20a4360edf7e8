"""Tasks that run in a process of their own: they cannot affect this process, and a crash becomes an error message."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lit_efficient.errors import LitEfficientError, is_out_of_memory

_PLANNING = 180.0  # seconds


class TaskFailed(Exception):
    """A task has no result.

    Args:
        reason: Reason on one line.
        refused: True if the reason is a user error that this package reported.
        late: True if the task took too long.
    """

    def __init__(self, reason: str, refused: bool = False, late: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refused = refused
        self.late = late


def own_process(
    task: Callable[..., object],
    *given: object,
    heard: Callable[[int], None] = lambda step: None,
    log: Path | None = None,
    most_seconds: float | None = None,
) -> Any:
    """Return the result of ``task(*given, tell)`` in a separate process. The result travels as JSON.

    Args:
        task: A function at the top level of a module.
        given: Its arguments.
        heard: Function that receives the whole numbers that the task passes to ``tell``.
        log: File for the output of the task; ``None`` discards the output.
        most_seconds: Time after which the process is killed.

    Raises:
        TaskFailed: If there is no result.
        KeyboardInterrupt: If the user interrupts. The process is ended first.
    """
    with OwnProcess(task, *given, log=log) as process:
        return process.result(heard, most_seconds)


def plan_seconds(minutes: float) -> float:
    """Return the time after which a plan is ended, in a search of so many minutes."""
    return min(_PLANNING, 60 * minutes)


class OwnProcess:
    """A process that starts at once, runs a task as in :func:`own_process`, and is killed when the context ends."""

    def __init__(self, task: Callable[..., Any], *given: object, log: Path | None = None) -> None:
        # A fork inherits all imports, which saves seconds for each task.
        context: Any = multiprocessing.get_context("fork" if forks() else "spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(task, given, sender, log, torch.get_num_threads()))
        try:
            self._process.start()
        except Exception as error:  # a process that is not forked gets its arguments by pickle
            raise TaskFailed(f"cannot be sent to a separate process: {_reason(error)}") from error
        sender.close()

    def __enter__(self) -> "OwnProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            # The process leads a process group with its data loader workers.
            with contextlib.suppress(OSError, AttributeError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self._receiver.close()

    def result(self, heard: Callable[[int], None] = lambda step: None, most_seconds: float | None = None) -> Any:
        """Wait for the task's result and return it.

        Args:
            heard: Function that gets each whole number that the task passes to ``tell``.
            most_seconds: Time limit. The process is killed at the end of the context.

        Raises:
            TaskFailed: If the task fails, or if the time limit is reached.
        """
        end = time.monotonic() + (most_seconds or math.inf)
        while time.monotonic() < end:
            try:
                if not self._receiver.poll(min(1.0, max(0.0, end - time.monotonic()))):
                    continue
                message = self._receiver.recv()
            except EOFError:
                self._process.join()
                raise TaskFailed(_death(self._process.exitcode)) from None
            if isinstance(message, int):
                heard(message)
                continue
            # The result is sent before the process exits.
            self._process.join(10)
            kind, value = json.loads(message)
            if kind == "result":
                return value
            raise TaskFailed(value, refused=kind == "refused")
        raise TaskFailed(f"took more than {most_seconds:g} seconds", late=True)


def forks() -> bool:
    """True if a separate process is forked, and so has all imports. A forked process cannot use an accelerator."""
    uses_accelerator = torch.cuda.is_initialized()
    if sys.platform == "darwin":
        uses_accelerator |= torch.accelerator.is_available()
    return "fork" in multiprocessing.get_all_start_methods() and not uses_accelerator


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code} and without a message"
    if -code == signal.SIGKILL:
        return "its process was killed (SIGKILL): out of memory, most likely"
    name = str(-code)
    if -code in signal.valid_signals():
        name = signal.Signals(-code).name
    return f"its process was killed ({name})"


def _child(
    task: Callable[..., object], given: tuple[object, ...], pipe: Connection, log: Path | None, threads: int
) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setsid()  # so that Ctrl-C reaches only the parent
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # The thread pool of torch does not survive a fork. A new thread creates a new pool.
    thread = threading.Thread(target=_run, args=(task, given, pipe, os.getppid(), threads), daemon=True)
    thread.start()
    thread.join()
    sys.stdout.flush()
    # Exit handlers of the parent, of loggers and of tests must not run twice.
    os._exit(0)


def _run(task: Callable[..., object], given: tuple[object, ...], pipe: Connection, parent: int, threads: int) -> None:
    def tell(number: int) -> None:
        # Without a parent no process reads the result.
        if os.getppid() != parent:
            raise SystemExit("the parent process is gone")
        pipe.send(number)

    # A new thread does not inherit the number of threads.
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        answer = ("result", task(*given, tell))
    except BaseException as error:
        traceback.print_exc()
        kind = "refused" if isinstance(error, LitEfficientError) else "failed"
        answer = (kind, _reason(error))
    pipe.send(json.dumps(answer))
    pipe.close()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if is_out_of_memory(error) and "out of memory" not in text.lower():
        return f"out of memory: {text}"
    if is_out_of_memory(error):
        return text
    if isinstance(error, LitEfficientError) and text:
        return text
    return f"{type(error).__name__}: {text}"[:500]

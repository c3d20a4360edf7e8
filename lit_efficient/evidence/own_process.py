"""A task in a process of its own: what it does to this one is nothing, and what it dies of is said."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_efficient.errors import LitEfficientError, is_out_of_memory

_PLANNING = 180.0  # seconds


class TaskFailed(Exception):
    """A task has no result: why, on one line; whether it was an error of the package's, that the user can mend, or took
    too long.
    """

    def __init__(self, reason: str, refused: bool = False, late: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.refused, self.late = reason, refused, late


def own_process(
    task: Callable[..., Any],
    *given: Any,
    heard: Callable[[int], None] = lambda step: None,
    log: Path | None = None,
    most_seconds: float | None = None,
) -> Any:
    """Return what ``task(*given, tell)``, a function of a module, returns in a process of its own, through JSON.

    ``heard`` gets the whole numbers that it calls ``tell`` with, the file ``log`` what it prints; it is killed after
    ``most_seconds``.

    Raises:
        TaskFailed: If there is no result.
        KeyboardInterrupt: As it comes; the process is ended first.
    """
    with OwnProcess(task, *given, log=log) as process:
        return process.result(heard, most_seconds)


def plan_seconds(minutes: float) -> float:
    """After how many seconds a plan hangs, in a search of so many minutes."""
    return min(_PLANNING, 60 * minutes)


class OwnProcess:
    """As :func:`own_process`, of one that begins at once, and is ended with the context."""

    def __init__(self, task: Callable[..., Any], *given: Any, log: Path | None = None) -> None:
        context: Any = multiprocessing.get_context("fork" if forks() else "spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(task, given, sender, log, torch.get_num_threads()))
        try:
            self._process.start()
        except Exception as error:  # what cannot be pickled for a process that is not forked
            raise TaskFailed(f"cannot be sent to a process of its own: {_said(error)}") from error
        sender.close()

    def __enter__(self) -> "OwnProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and its workers; it leads a group of its own."""
        if self._process.is_alive():
            with contextlib.suppress(OSError, AttributeError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self._receiver.close()

    def result(self, heard: Callable[[int], None] = lambda step: None, most_seconds: float | None = None) -> Any:
        """What came of it."""
        end = time.monotonic() + (most_seconds or float("inf"))
        try:
            while (left := end - time.monotonic()) > 0:
                if not self._receiver.poll(min(1.0, left)):
                    continue
                message = self._receiver.recv()
                if isinstance(message, int):
                    heard(message)
                    continue
                self._process.join(10)
                kind, value = json.loads(message)
                if kind == "result":
                    return value
                raise TaskFailed(value, refused=kind == "refused")
        except EOFError:
            self._process.join()
            raise TaskFailed(_death(self._process.exitcode)) from None
        raise TaskFailed(f"took more than {most_seconds:g} seconds", late=True)


def forks() -> bool:
    """Whether a process of its own is a fork, which has everything imported; of one that uses an accelerator it could
    not use that.
    """
    return "fork" in multiprocessing.get_all_start_methods() and not _uses_accelerator()


def _uses_accelerator() -> bool:
    return torch.cuda.is_initialized() or (sys.platform == "darwin" and torch.accelerator.is_available())


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code} and said nothing"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"its process was killed ({name})" + (": out of memory, most likely" if name == "SIGKILL" else "")


def _child(task: Callable[..., Any], given: tuple[Any, ...], pipe: Any, log: Path | None, threads: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setsid()  # Ctrl-C is the parent's
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    # In a thread: the pool of threads with which the parent may have computed does not survive a fork.
    thread = threading.Thread(target=_run, args=(task, given, pipe, os.getppid(), threads), daemon=True)
    thread.start()
    thread.join()
    sys.stdout.flush()
    os._exit(0)  # no handler of the parent's, of a logger's or of a test's runs twice


def _run(task: Callable[..., Any], given: tuple[Any, ...], pipe: Any, parent: int, threads: int) -> None:
    def tell(number: int) -> None:
        if os.getppid() != parent:
            raise SystemExit("the process that asked is gone")
        pipe.send(number)

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        answer = "result", task(*given, tell)
    except BaseException as error:
        traceback.print_exc()
        answer = "refused" if isinstance(error, LitEfficientError) else "failed", _said(error)
    pipe.send(json.dumps(answer))
    pipe.close()


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return text if "out of memory" in text.lower() else f"out of memory: {text}"
    return text if isinstance(error, LitEfficientError) and text else f"{type(error).__name__}: {text}"[:500]

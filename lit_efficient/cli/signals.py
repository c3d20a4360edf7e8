"""Signals that no SignalCheckpoint answers: one Lightning swallows, another would kill a run that is done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from lightning.pytorch.plugins.environments import SLURMEnvironment


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside with 128 + 15; Lightning's own handler would note it and go on."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def ignore_warnings_of_the_end(done: bool) -> None:
    """SIGUSR1, a scheduler's warning that time is running out, kills no run that has nothing to save, or has saved it.

    Until the fit is ``done``, Lightning's automatic requeueing under SLURM needs the signal untouched.
    """
    warning = getattr(signal, "SIGUSR1", None)
    if warning is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(warning) == signal.SIG_DFL and (done or not SLURMEnvironment.detect()):
        signal.signal(warning, signal.SIG_IGN)

"""Signals that no SignalCheckpoint handles: Lightning ignores one, and another would kill a run that has finished."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from lightning.pytorch.plugins.environments import SLURMEnvironment


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """End what runs inside with exit code 128 + 15 on SIGTERM. Lightning's own handler would continue."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
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
    """Ignore SIGUSR1, with which a scheduler warns that time is running out, in a run that has nothing to save.

    Args:
        done: True after the fit. Before, automatic requeueing of Lightning under SLURM needs the signal's default.
    """
    warning = getattr(signal, "SIGUSR1", None)  # Windows has none
    if warning is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(warning) == signal.SIG_DFL and (done or not SLURMEnvironment.detect()):
        signal.signal(warning, signal.SIG_IGN)

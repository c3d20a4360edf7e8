"""What loader workers raise that nobody waits for any more is not printed; everything else is."""

import os
import signal
import socket
import sys
import threading
import time
from multiprocessing import current_process, resource_sharer
from multiprocessing.connection import Client

import pytest
import torch
from torch.utils.data import DataLoader

from lit_efficient.cli.defaults import quiet


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: found.append(kind.__name__))
    monkeypatch.setattr(sys, "unraisablehook", lambda given: found.append(given.exc_type.__name__))
    quiet()
    quiet()  # once is enough
    return found


class Lost:
    """A batch's part whose receiver is gone, or that fails by itself."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def send(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"), [(ConnectionResetError(104, "reset"), []), (KeyError("x"), ["KeyError"])], ids=["gone", "other"]
)
def test_a_batch_that_nobody_fetches(printed: list[str], error: Exception, said: list[str]) -> None:
    sharer = resource_sharer._ResourceSharer()  # type: ignore[attr-defined]
    closed = threading.Event()
    address, key = sharer.register(Lost(error).send, closed.set)
    with Client(address, authkey=current_process().authkey) as c:
        c.send((key, os.getpid()))
        assert closed.wait(5)
        time.sleep(0.1)
    sharer.stop(timeout=5)
    assert printed == said


def test_the_same_error_elsewhere_is_printed(printed: list[str]) -> None:
    left, right = socket.socketpair()
    right.close()
    try:
        left.send(b"x")
    except ConnectionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    left.close()
    assert printed == ["BrokenPipeError"]


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("DataLoader worker"), []), (KeyError("x"), ["KeyError"])], ids=["dead", "other"]
)
def test_workers_that_die_as_their_iterator_is_deleted(printed: list[str], error: Exception, said: list[str]) -> None:
    rows = iter(DataLoader(torch.arange(8), num_workers=1))  # type: ignore[arg-type]
    next(rows)
    worker = rows._workers[0]  # type: ignore[attr-defined]

    def dead(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGCHLD, dead)
    del rows
    signal.signal(signal.SIGCHLD, before)
    worker.join(5)
    assert printed == said


def test_the_same_error_of_another_deleted_object_is_printed(printed: list[str]) -> None:
    class Deleted:
        def __del__(self) -> None:
            raise RuntimeError("DataLoader worker")

    Deleted()
    assert printed == ["RuntimeError"]

"""Files that are whole or not there, also where the system lacks what a POSIX one has."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from lit_efficient import SignalCheckpoint
from lit_efficient.files.atomic_file import replacing
from lit_efficient.mechanisms.trials.memory import available_cpu_memory


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks, or does otherwise: signal 0 ends a process there, folders cannot be opened."""

    def never(*_: object) -> None:
        raise AssertionError("this would end the process")

    def closed(path: object, flags: int, *rest: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", never)
    monkeypatch.setattr(os, "open", closed)
    monkeypatch.delattr(os, "sysconf")


@pytest.mark.usefixtures("windows")
def test_a_file_is_replaced_and_what_killed_processes_left_goes_by_its_age(tmp_path: Path) -> None:
    young, old = (tmp_path / f".x.{socket.gethostname()}-{os.getppid()}-{number:08x}.partial" for number in (1, 2))
    for path in (young, old):
        path.write_text("half")
    os.utime(old, (1e9, 1e9))
    target = tmp_path / "x"
    for content in (b"one", b"two"):
        with replacing(target) as file:
            file.write(content)
    assert target.read_bytes() == b"two"
    assert {path.name for path in tmp_path.iterdir()} == {"x", young.name}


@pytest.mark.usefixtures("windows")
def test_free_memory_is_unknown_there() -> None:
    assert available_cpu_memory() is None


def test_free_memory_is_unknown_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    assert (available_cpu_memory() or 0) > 0
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert available_cpu_memory() is None


@pytest.mark.usefixtures("windows")
def test_signals_that_are_missing_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: signal.Signals[name] for name in ("SIGTERM", "SIGINT")}
    monkeypatch.setattr(signal.Signals, "_member_map_", there)
    assert SignalCheckpoint()._numbers == list(there.values())

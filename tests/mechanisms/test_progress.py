"""Progress of long work: lines from time to time, and a bar in a terminal."""

import io
import sys

import pytest

from lit_efficient.mechanisms import progress
from lit_efficient.mechanisms.progress import Progress


class Clock:
    """Time that passes by 10 seconds with each look at it."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        cls.now += 10.0
        return cls.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock)


def test_lines_without_a_terminal(clock, capsys):
    work = Progress("encoding", "images", total=1000, done=200)
    for _ in range(8):
        work.update(100)
    assert capsys.readouterr().err.splitlines() == [
        "encoding: 500 of 1,000 images, about 50 s left",
        "encoding: 800 of 1,000 images, about 20 s left",
    ]
    work = Progress("tokenising train", "rows")
    for _ in range(4):
        work.update(256)
    work.close()
    assert capsys.readouterr().err == "tokenising train: 768 rows\n"


def test_a_bar_in_a_terminal(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    work = Progress("encoding", "images", total=4)
    for _ in range(4):
        work.update(1)
    shown = sys.stderr.getvalue()
    assert "encoding:   0%" in shown
    assert "left" not in shown

"""Progress of long work: lines from time to time, and a bar in a terminal."""

import io
import sys

import pytest

from lit_efficient.mechanisms import progress
from lit_efficient.mechanisms.progress import Progress
from tests.support import SlowClock


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "time", SlowClock())


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
    with Progress("encoding", "captions", total=500) as work:
        work.skip(300)
        for _ in range(2):
            work.update(100)
    assert capsys.readouterr().err == "encoding: 500 of 500 captions, about 0 s left\n"
    for silent in (Progress("encoding", "captions", total=0), Progress("reading data", "rows", total=9, shown=False)):
        for _ in range(9):
            silent.update(1)
    assert capsys.readouterr().err == ""


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
    with Progress("encoding", "captions", total=4) as work:  # left before its end, as by an error
        work.skip(3)
    assert sys.stderr.getvalue().removeprefix(shown).endswith("\r")  # no rest of the bar
    before = sys.stderr.getvalue()
    Progress("encoding", "images", total=4, done=4).close()
    assert sys.stderr.getvalue() == before
    assert "left" not in shown

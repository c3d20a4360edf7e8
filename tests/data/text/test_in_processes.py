"""Tests of worker processes that fail or end, from the view of the parent."""

import os

import pytest

from lit_efficient.data.text.in_processes import _sendable, _Worker
from lit_efficient.errors import LitEfficientError


def test_a_process_that_has_ended_is_an_error_of_ours_whoever_meets_it():
    with _Worker(os._exit) as worker:
        worker.give(3)
        worker._process.wait()
        for meet in (lambda: worker.give(b"more"), worker.take):
            with pytest.raises(LitEfficientError, match=r"a process that tokenises has ended \(3\)"):
                meet()


class Strange(Exception):
    def __init__(self, what, where):
        super().__init__(what)


def test_an_error_that_pickle_cannot_make_again_is_sent_as_its_words():
    assert str(_sendable(Strange("a bad row", 7))) == "Strange: a bad row"
    error = ValueError("a bad row")
    assert _sendable(error) is error

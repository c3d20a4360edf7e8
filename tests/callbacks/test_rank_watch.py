from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lit_efficient import ConfigurationError, RankWatch
from tests.processes import await_ends, run_ranks, start_ranks
from tests.ranks import watching

SAID = {
    "raised": "failed (KeyError: 'a row that is not there')",
    "left": "left training (it ended its training after 3 steps)",
    "killed": "failed (its connection ended without a message, as that of a killed process)",
    "terminated": "failed (it was sent SIGTERM)",  # and Lightning would wait, in the signal's handler, for the others
}


@pytest.mark.turns(3, family="ranks", always=["raised"])
@pytest.mark.parametrize("how", SAID)
def test_a_process_that_is_left_alone_ends_with_a_sentence(how: str, tmp_path: Path) -> None:
    (first, second), logs = start_ranks(watching.waited_for, tmp_path, how)
    try:
        first.join(120)
        codes = {"killed": [1], "terminated": [1, 2]}.get(how, [2])  # its collectives notice an end, perhaps first
        assert first.exitcode in codes, logs[0].read_text()[-4000:]
        said = logs[0].read_text()
        assert f"this process ends, because it would wait forever: process 1 has {SAID[how]}" in said, said[-4000:]
        assert ("Traceback" in said) == (first.exitcode == 1)
        if how in watching.SIGNALS:
            second.join(20)
        ends = {"killed": -signal.SIGKILL, "terminated": 128 + signal.SIGTERM}
        assert second.exitcode == ends.get(how), logs[1].read_text()[-4000:]
    finally:
        (tmp_path / "ended").touch()
        for rank in (first, second):
            rank.join(10)
            rank.kill()


@pytest.mark.turns(3, family="ranks", always=["0"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_while_data_are_prepared_is_waited_for_by_nobody(victim: int, tmp_path: Path) -> None:
    """Nobody is watched yet, and gloo's error was all that was said."""
    ranks, logs = start_ranks(watching.prepared, tmp_path, victim)
    await_ends(ranks, 60)
    said = logs[1 - victim].read_text()
    assert (ranks[victim].exitcode, ranks[1 - victim].exitcode) == (-signal.SIGKILL, 1), said[-4000:]
    assert "this process ends, because it would wait forever: another process has ended" in said, said[-4000:]


@pytest.mark.turns(3, family="ranks", always=["False"])
@pytest.mark.parametrize("sized", [True, False])
def test_processes_with_unlike_numbers_of_batches_end_with_a_sentence(sized: bool, tmp_path: Path) -> None:
    """In shards, where one waits for what the other sends for its validation: it hung until the timeout."""
    ranks, logs = start_ranks(watching.uneven, tmp_path, sized)
    await_ends(ranks, 50)
    said = "".join(log.read_text() for log in logs)
    assert all(rank.exitcode == 0 for rank in ranks) is sized, said[-4000:]
    assert ("process 1 has left training (its epoch ends after 3 batches)" in said) is not sized, said[-4000:]


@pytest.mark.turns(3, family="ranks")
def test_a_connection_that_is_closed_by_an_earlier_end_is_explained(tmp_path: Path) -> None:
    """gloo's error says "Connection closed by peer", and that the other process crashed: it ended well."""
    ranks, logs = start_ranks(watching.outlasted, tmp_path, 1)
    await_ends(ranks, 60)
    assert [rank.exitcode for rank in ranks] == [1, 0], logs[0].read_text()[-4000:]
    said = "would wait forever: process 1 has left training (its epoch ends after 3 batches)"
    assert said in logs[0].read_text()


@pytest.mark.turns(3, family="ranks")
def test_an_epoch_that_ends_earlier_within_a_window_ends_both(tmp_path: Path) -> None:
    """Neither leaves training: both waited until the strategy's timeout."""
    ranks, logs = start_ranks(watching.outlasted, tmp_path, 2)
    await_ends(ranks, 50)
    assert [rank.exitcode for rank in ranks] == [2, 1], logs[0].read_text()[-4000:]
    assert "process 1 has left training (its epoch ends after 3 batches)" in logs[0].read_text()


@pytest.mark.turns(3, family="ranks", always=["False"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_that_saves_alone_is_waited_for_by_nobody(sharded: bool, tmp_path: Path) -> None:
    ranks, logs = start_ranks(watching.saved_alone, tmp_path, sharded)
    await_ends(ranks, 50)
    said = "".join(log.read_text() for log in logs)
    assert not {rank.exitcode for rank in ranks} & {0, -signal.SIGKILL}, said[-4000:]
    assert "process 0 has left training (it saves a checkpoint after 3 batches, for which all are needed)" in said


@pytest.mark.turns(6, family="ranks")
def test_processes_that_end_together_are_left_in_peace(tmp_path: Path) -> None:
    run_ranks(watching.ended_together, tmp_path)


@pytest.mark.turns(6, family="ranks")
def test_processes_that_cannot_reach_each_other_train_unwatched(tmp_path: Path) -> None:
    run_ranks(watching.unreachable, tmp_path)


@pytest.mark.parametrize("name", ["failed", "left"])
def test_bad_arguments_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RankWatch: {name} must be above 0, got 0"):
        RankWatch(**{name: 0})

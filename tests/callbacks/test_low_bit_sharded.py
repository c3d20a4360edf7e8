"""LowBitOptimizer with parameters sharded over two processes: torchao's states are sharded, too, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_ranks
from tests.ranks import low_bit


@pytest.mark.turns(6, family="ranks")
def test_sharded_states_resume_exactly_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    run_ranks(low_bit.resumed_exactly, tmp_path)


@pytest.mark.turns(6, family="ranks")
def test_whole_states_and_codes_of_one_shape_are_stepped_apart(tmp_path: Path) -> None:
    run_ranks(low_bit.one_of_two_matrices_of_a_shape, tmp_path)

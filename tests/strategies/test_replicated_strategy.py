from __future__ import annotations

from pathlib import Path

import pytest

from lit_efficient import ConfigurationError, ReplicatedStrategy
from tests.processes import run_ranks
from tests.ranks import replicated


@pytest.mark.turns(6, family="slow")
def test_gradients_are_those_of_plain_ddp_in_memory_of_the_buckets(tmp_path: Path) -> None:
    run_ranks(replicated.both, tmp_path)


@pytest.mark.turns(6, family="ranks")
def test_three_processes_resume_to_the_bit(tmp_path: Path) -> None:
    run_ranks(replicated.resumed_by_three, tmp_path, processes=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"compression": "fp8"}, "compression must be bf16 or none"), ({"bucket_mb": 0}, "bucket_mb must be above 0")],
)
def test_bad_arguments_are_refused(arguments: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ReplicatedStrategy(**arguments)

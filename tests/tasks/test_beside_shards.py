"""References and teachers beside a sharded network: as in one process, and whole in none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import run_ranks
from tests.ranks import beside


@pytest.mark.turns(4, family="ranks")
def test_references_and_teachers_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    beside.write(str(tmp_path))
    run_ranks(beside.on_two, tmp_path, str(tmp_path), [*beside.CASES])
    for name in beside.CASES:
        plain, _, _ = beside.fitted(name, str(tmp_path))
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{name}_{rank}.pt")
            torch.testing.assert_close(found["losses"], plain, rtol=1e-5, atol=1e-5, msg=f"{name}: {found} {plain}")
            torch.testing.assert_close(
                found["resumed"], plain[2:], rtol=1e-5, atol=1e-5, msg=f"{name}: {found} {plain}"
            )

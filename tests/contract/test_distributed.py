"""The contract on two gloo processes: DDP equals one process with twice the batch, FSDP2 trains or refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_efficient import SNRWeighting, StochasticDepth
from tests.processes import run_ranks
from tests.ranks import contract
from tests.support import Toy, data, trainer, weights


@pytest.mark.turns(2)
@pytest.mark.parametrize("skip", ["batch", "sample"])
def test_ddp_ranks_stay_equal_and_resume_bit_exactly(skip: str, tmp_path: Path) -> None:
    run_ranks(contract.resumed_exactly, tmp_path, skip)


@pytest.mark.turns(6, family="ranks")
def test_ddp_equals_one_process_on_the_whole_batch(tmp_path: Path) -> None:
    """The same blocks are dropped on both ranks, so the averaged gradients are those of the whole batch."""
    run_ranks(contract.halves_of_batches, tmp_path)
    module = Toy("configure_model")
    trainer([StochasticDepth(0.7), SNRWeighting(gamma=1.0)], max_epochs=1).fit(module, data(32, 8), data())
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for name, tensor in weights(module).items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5)


def test_fsdp2_trains_with_what_works_on_shards_and_refuses_the_rest(tmp_path: Path) -> None:
    run_ranks(contract.trained_or_refused_on_shards, tmp_path)

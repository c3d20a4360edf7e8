"""APOLLO: what it keeps, and what it reports. What it shares with GaLore is in test_galore.py and test_low_rank.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_efficient import APOLLO, ConfigurationError
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Toy, data, trainer

RANK = 4


def moments_live_in_a_random_subspace(run: Run) -> None:
    """Moments of linear layers, in the run and in the checkpoint, have four rows, and there is no basis."""
    (optimizer,) = run.trainer.optimizers
    for states in (optimizer.state_dict()["state"], run.checkpoint["optimizer_states"][0]["state"]):
        seen = [state for state in states.values() if "norm" in state]
        assert seen
        assert all(set(state) == {"step", "exp_avg", "exp_avg_sq", "norm"} for state in seen)
        assert all(RANK in state["exp_avg"].shape for state in seen)


ROW = Row(
    lambda: APOLLO(rank=RANK, update_every=3),
    moments_live_in_a_random_subspace,
    beside={"ReplaceHead": lambda: APOLLO(rank=RANK, update_every=3, targets=["head"])},
)


def test_one_scale_a_tensor_is_mini() -> None:
    with pytest.raises(ConfigurationError, match="APOLLO: granularity must be one of channel, tensor, got 'row'"):
        APOLLO(granularity="row")  # type: ignore[arg-type]
    layer = nn.Linear(24, 40, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
    report = APOLLO(rank=1, granularity="tensor", targets=["0"]).rewrite_optimizer(optimizer, nn.Sequential(layer))
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn_like(before)
    optimizer.step()
    moved = before - layer.weight.detach()
    torch.testing.assert_close(moved / moved.norm(), layer.weight.grad / layer.weight.grad.norm())
    assert report.details["state_bytes"] == 2 * 40 * 4  # two moments of the longer side


def test_the_checkpoint_of_a_run_without_techniques_is_refused_by_name(tmp_path: Path) -> None:
    """Moments of full rank fit a rank of one by broadcasting: without a word the numbers would be wrong."""
    plain = trainer([], max_epochs=1)
    plain.fit(Toy(), data(), data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ConfigurationError, match="APOLLO is new: the checkpoint was written without it"):
        trainer([APOLLO(rank=1)], max_epochs=2).fit(Toy(), data(), data(), ckpt_path=tmp_path / "plain.ckpt")

"""LossCurriculum: only the easiest samples of a batch count at first, later all; the weights have mean one."""

from __future__ import annotations

import pytest
import torch

from lit_efficient import ConfigurationError, LossCurriculum
from lit_efficient.losses.selection import easiest
from lit_efficient.testing import Run, data, trainer
from tests.contract.row import Row
from tests.support import Toy


def hard_ones_wait(run: Run) -> None:
    """In the first step the hardest samples have no influence, later each sample has some."""
    first, last = run.steps[0].seen, run.steps[-1].seen
    if len(first["sample_loss"]) > 1:
        assert float(first["influence"][first["sample_loss"].argmax()]) == 0
    assert first["influence"].any()
    assert run.steps[-1].number <= 1 or last["influence"].all()


ROW = Row(lambda: LossCurriculum(0.5, steps=1), hard_ones_wait, lambda: LossCurriculum(1.0, steps=1))


def test_weights_are_those_of_the_mean_over_the_easiest() -> None:
    losses = torch.tensor([3.0, 1.0, 2.0, 1.0, 5.0])
    for share in (0.1, 0.2, 0.21, 0.5, 0.6, 0.99, 1.0):
        count = next(k for k in range(1, 6) if k >= share * 5 - 1e-9)
        slow = sum(sorted(losses.tolist())[:count]) / count
        assert float((easiest(losses, share) * losses).mean()) == pytest.approx(slow)
    assert easiest(losses, 0.2).tolist() == [0, 5, 0, 0, 0]
    assert int((easiest(torch.arange(100.0), 0.55) > 0).sum()) == 55  # 0.55 * 100 is above it in binary


def test_bad_arguments_and_losses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="LossCurriculum: start must be above 0 and at most 1, got 0"):
        LossCurriculum(0)
    with pytest.raises(ConfigurationError, match=r"steps=0.5 is a fraction of Trainer\(max_steps=...\)"):
        trainer([LossCurriculum()]).fit(Toy(), data(), data())
    with pytest.raises(ConfigurationError, match="LossCurriculum got no sample losses"):
        trainer([LossCurriculum(steps=5)], max_steps=1).fit(Toy(protocol=False), data(), data())

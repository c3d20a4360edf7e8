"""Averages on two gloo processes: DDP ranks agree, FSDP2 averages shards in place, both resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import CheckpointAverage, PowerEMA
from tests.processes import run_ranks
from tests.ranks import averages
from tests.support import assert_equal, data, trainer


@pytest.mark.turns(6, family="ranks")
def test_averages_are_sharded_as_the_weights_are_and_resume_exactly(tmp_path: Path) -> None:
    run_ranks(averages.sharded_as_the_weights, tmp_path)


@pytest.mark.turns(6, family="ranks")
def test_checkpoint_averages_and_power_emas_are_sharded_and_equal_those_of_one_process(tmp_path: Path) -> None:
    run_ranks(averages.snapshots, tmp_path)
    for last_k in (2, None):
        average, power = CheckpointAverage(last_k, 2), PowerEMA((0.1, 0.2), 4, str(tmp_path / "one"))
        run = trainer([average, power], max_epochs=2)
        run.fit(averages.OneProcess("configure_model", network=averages.Small), data(32, batch_size=8), data())
        straight = torch.load(tmp_path / f"alone{last_k}.ckpt", weights_only=True)
        assert straight["lit_efficient"]["weights"] == "average"
        torch.testing.assert_close(straight["state_dict"], dict(average.average(run.model)), rtol=1e-4, atol=1e-5)
    assert_equal(straight["state_dict"], torch.load(tmp_path / "resumed.ckpt", weights_only=True)["state_dict"])
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    for name in files:
        one, whole, parts = (load_file(tmp_path / folder / name) for folder in ("one", "straightNone", "resumed"))
        assert_equal(whole, parts)
        torch.testing.assert_close(whole, one, rtol=1e-4, atol=1e-5)

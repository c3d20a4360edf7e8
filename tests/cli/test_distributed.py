"""DDP from the command line: the launcher starts the second process with the same arguments."""

from pathlib import Path

import pytest
import torch

from tests.cli.toy_runs import ALLOW, fit
from tests.processes import python
from tests.support import assert_equal


def on_two(*arguments):
    return python("-m", "lit_efficient", "fit", *ALLOW, "-c", "base.yaml", "--trainer.devices", "2", *arguments)


@pytest.mark.turns(4, family="ranks")
def test_a_module_that_shards_nothing_does_not_train_apart():
    done = on_two("--trainer.strategy", "ModelParallelStrategy")
    assert done.returncode == 2, (done.stdout + done.stderr)[-4000:]
    assert "error: ModelParallelStrategy shards nothing by itself, and neither does ToyModel" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.turns(4, family="ranks")
def test_two_processes_train_as_one_does_on_both_batches():
    """A batch holds all of a process's rows, so that two processes see together what one sees, in whatever order."""
    weights = "--trainer.callbacks+=tests.support_cli.WeightsOfRank"
    assert fit(weights, "--data.batch_size", "8") == 0
    alone = torch.load("rank0.pt", weights_only=True)
    Path("rank0.pt").unlink()

    tells = "--trainer.callbacks+=tests.cli.test_run_record.Tells"
    done = on_two(weights, "--trainer.strategy", "ddp", "--data.batch_size", "4", tells, "--quiet")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    first, second = (torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert (alone.pop("world"), first["world"]) == (1, 2)
    assert_equal(first, second)
    torch.testing.assert_close({name: tensor for name, tensor in first.items() if name != "world"}, alone)
    assert done.stdout.count("Done.") == 1  # rank 0 alone speaks
    alone_and_both = [run for run in Path("runs/base").iterdir() if not run.is_symlink()]
    assert [len(list(run.glob("config.yaml"))) for run in alone_and_both] == [1, 1]
    log = Path("runs/base/latest/log.txt").read_text()
    assert [line[:9] for line in log.splitlines() if "UserWarning: mind the step" in line][-1:] == ["[rank 1] "]
    assert {"Seed set to 0", "red words"} <= {*log.splitlines()}  # the one before the folder was known
    assert "Seed set" not in done.stderr
    assert done.stdout.startswith("\nDone.")

"""DDP from the command line: the launcher starts the second process with the same arguments."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.toy_runs import ALLOW, fit
from tests.processes import python
from tests.support import assert_equal


def on_two(*arguments):
    return python("-m", "lit_efficient", "fit", *ALLOW, "-c", "base.yaml", "--trainer.devices", "2", *arguments)


@pytest.mark.turns(6, family="ranks")
def test_a_module_that_shards_nothing_does_not_train_apart():
    done = on_two("--trainer.strategy", "ModelParallelStrategy")
    assert done.returncode == 2, (done.stdout + done.stderr)[-4000:]
    assert "error: ModelParallelStrategy shards nothing by itself, and neither does ToyModel" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.turns(6, family="ranks")
def test_a_checkpoint_in_shards_is_gone_on_from_and_carries_hashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toys, own = "tests.cli.sharded_toy", {"data_parallel_size": 1, "tensor_parallel_size": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    strategy = {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": own}
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "strategy": strategy, **quiet}
    config = {
        "trainer": trainer,
        "model": {"class_path": f"{toys}.ShardedToy"},
        "data": {"class_path": f"{toys}.ToyRows"},
    }
    Path("sharded.yaml").write_text(yaml.safe_dump(config))
    words = ["-m", "lit_efficient", "fit", *ALLOW, "-c", "sharded.yaml"]
    whole = python(*words, "--trainer.max_steps", "8")
    python(*words)
    last = Path("runs/sharded/latest/last.ckpt").resolve()
    names = {line.split("  ")[1] for line in (last / "SHA256SUMS").read_text().splitlines()}
    assert names == {".metadata", "__0_0.distcp", "meta.pt"}
    done = python(*words, "--ckpt_path", str(last), "--trainer.max_steps", "8")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    said = [next(line for line in one.stdout.splitlines() if line.startswith("ended with")) for one in (whole, done)]
    assert said[0] == said[1]
    ended = python(*words, "--ckpt_path", str(last))
    assert ended.returncode == 6
    assert "is at step 8, and trainer.max_steps is 4" in ended.stderr  # the second fit went on in the same folder


@pytest.mark.turns(6, family="ranks")
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

"""W&B: offline without a key, and no question asked."""

import json
import time
from pathlib import Path

import pytest

from lit_efficient.cli.preflight import go_offline_without_key
from tests.cli.toy_runs import OVERLAYS, fit
from tests.support_cli import Recorder


@pytest.mark.turns(4, family="whole programs")
def test_a_wandb_run_without_a_key_is_recorded_offline(monkeypatch, capsys, tmp_path_factory):
    import wandb

    with monkeypatch.context() as elsewhere:  # a service that an earlier run of this process left there
        elsewhere.chdir(tmp_path_factory.mktemp("elsewhere"))
        wandb.setup().ensure_service()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("NETRC", str(Path.cwd() / "netrc"))
    try:
        code = fit("-c", str(OVERLAYS / "loggers/wandb.yaml"), "--trainer.enable_checkpointing", "true")
        assert code == 0
        experiment = Recorder.last.trainer.logger.experiment
        assert experiment.offline
        assert experiment.config["trainer"]["max_epochs"] == 2
        assert experiment.config["model"]["class_path"] == "tests.support_cli.ToyModel"
    finally:
        wandb.finish()
        monkeypatch.delenv("WANDB_MODE", raising=False)
    printed = capsys.readouterr().out
    sync = next(line.split()[-1] for line in printed.splitlines() if line.startswith("  wandb sync "))
    sizes: list[int] = []
    for _ in range(300):  # the service of W&B writes after `finish` has returned, on a busy machine seconds later
        sizes = [record.stat().st_size for record in Path(sync).glob("run-*.wandb")]
        if sizes and sizes[0] > 1000:
            break
        time.sleep(0.1)
    assert [size > 1000 for size in sizes] == [True]
    assert Path(sync).parts[:2] == ("runs", "base")
    run = Path("runs/base/latest")
    assert Path(sync).resolve().parent == run.resolve() / "wandb"  # beside the checkpoints and the config
    assert json.loads((run / "run.json").read_text())["loggers"] == [experiment.id]


@pytest.mark.parametrize(
    ("environment", "offline"),
    [
        ({}, True),
        ({"WANDB_API_KEY": "x"}, False),
        ({"WANDB_MODE": "online"}, False),
        ({"WANDB_MODE": "offline"}, False),
    ],
)
def test_wandb_goes_offline_only_without_a_word_and_a_key(environment, offline, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    config = {"trainer": {"logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}}}
    assert go_offline_without_key(config, environment) is offline
    assert (environment.get("WANDB_MODE") == "offline") is (offline or environment.get("WANDB_MODE") == "offline")
    assert go_offline_without_key({"trainer": {"logger": None}}, {}) is False


def test_a_key_in_netrc_is_found(tmp_path):
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password k\n")
    config = {"trainer": {"logger": [{"class_path": "WandbLogger"}]}}
    assert go_offline_without_key(config, {"NETRC": str(tmp_path / "keys")}) is False

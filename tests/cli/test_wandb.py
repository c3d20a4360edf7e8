"""W&B: offline without a key, and no question asked."""

import json
import time
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger

from lit_efficient import ConfigurationError
from lit_efficient.cli.preflight import go_offline_without_key
from lit_efficient.cli.tree import flat
from lit_efficient.internals.lightning_wandb import begin_late
from tests.cli.toy_runs import OVERLAYS, fit
from tests.support_cli import Recorder
from tests.wandb_file import config_of, ids_of, records

SECRET = "hunter2-hunter2"


class Talks(Callback):
    """Prints a secret, as a library may that shows its address; fails at a place, if it has one.

    Args:
        api_key: The secret.
        place: Hook that fails.
    """

    def __init__(self, api_key: str = "", place: str = "") -> None:
        self.api_key = api_key
        self.place = place
        if place:
            setattr(self, place, self._fail)

    def _fail(self, *args, **options) -> None:
        raise ConfigurationError(f"refused in {self.place}")

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        print(f"connected with {self.api_key}")


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    """No key and no mode; the service of W&B, which an earlier run of this process may have left, is elsewhere."""
    import wandb

    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path_factory.mktemp("elsewhere"))
        wandb.setup().ensure_service()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("NETRC", str(Path.cwd() / "netrc"))
    yield
    wandb.finish()
    monkeypatch.delenv("WANDB_MODE", raising=False)


def written(folder: Path) -> Path:
    """The file of a run, once the service of W&B has written it: it does so after `finish` has returned."""
    import wandb

    wandb.finish()
    for _ in range(300):
        files = list(folder.glob("run-*.wandb"))
        if files and any(one.WhichOneof("record_type") == "exit" for one in records(files[0])):
            return files[0]
        time.sleep(0.1)
    raise AssertionError(f"{folder} has no whole file")


WANDB = ("-c", str(OVERLAYS / "loggers/wandb.yaml"), "--trainer.enable_checkpointing", "true")


@pytest.mark.turns(4, family="whole programs")
def test_a_run_without_a_key_is_recorded_offline_with_the_whole_config(offline, capsys):
    talks = f"{{class_path: tests.cli.test_wandb.Talks, init_args: {{api_key: {SECRET}}}}}"
    ours = ["--trainer.callbacks+", talks, "-c", "ema", "--trainer.logger.log_model", "true", "--trainer.logger.notes"]
    assert fit(*WANDB, *ours, f"https://me:{SECRET}@there", "--model.hidden=5") == 0
    experiment = Recorder.last.trainer.logger.experiment
    assert experiment.offline
    shown = capsys.readouterr()
    assert "URL not available" not in shown.out + shown.err
    assert "anonymous setting" not in shown.out + shown.err
    sync = Path(next(line.split()[-1] for line in shown.out.splitlines() if line.startswith("  wandb sync ")))
    assert sync.parts[:2] == ("runs", "base")
    run = Path("runs/base/latest")
    assert sync.resolve().parent == run.resolve() / "wandb"  # beside the checkpoints and the config
    file = written(sync)
    assert json.loads((run / "run.json").read_text())["loggers"] == ids_of(file) == [experiment.id]

    config = config_of(file)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    found = flat(config)
    for key, value in flat(saved).items():  # each option under its own name
        assert found[key] == value, key
    assert config["trainer"]["callbacks"]["EMA"]["decay"] == 0.9999
    assert config["model"]["class_path"] == "tests.support_cli.ToyModel"
    assert found["model.hidden"] == 5
    assert config["trainer"]["callbacks"]["Talks"]["api_key"] == "***"
    assert any(key.startswith("techniques/EMA/") for key in config)

    assert "connected with" in shown.out
    for path in (path for path in sync.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
    models = [one.artifact for one in records(file) if one.artifact.type == "model"]
    assert [(one.name, list(one.aliases)) for one in models] == [(f"model-{experiment.id}", ["latest", "best"])]

    again = ["--ckpt_path", "last", "--trainer.max_epochs", "3"]  # the same run of W&B goes on
    assert fit(*WANDB, *ours, f"https://me:{SECRET}@there", "--model.hidden=5", *again) == 0
    folders = sorted((run / "wandb").glob("offline-run-*"), key=lambda one: one.stat().st_mtime)
    assert ids_of(written(folders[-1])) == [experiment.id]


@pytest.mark.parametrize("place", ["setup", "on_fit_start", "on_train_start"])
def test_a_refused_run_leaves_none_at_wandb(place, offline):
    talks = f"{{class_path: tests.cli.test_wandb.Talks, init_args: {{place: {place}}}}}"
    assert fit(*WANDB, "-c", "ema", "--trainer.callbacks+", talks) == 2
    assert not list(Path().rglob("*run-*"))


def test_a_hyperparameter_does_not_replace_a_section_of_the_config(offline):
    logger = WandbLogger(project="mine", save_dir=".", offline=True)
    begin_late(logger, lambda value: value)
    logger.log_config({"model": {"class_path": "LanguageModeling"}, "seed_everything": 0})
    logger.log_hyperparams({"model": {"dim": 8}, "learning_rate": 0.1})
    logger.experiment.summary.update({"found": 3})
    assert not logger.has_begun
    assert logger.version is not None
    assert not list(Path().rglob("*run-*"))
    logger.log_metrics({"loss": 1.0}, step=0)
    assert logger.experiment.config["model"] == {"class_path": "LanguageModeling"}
    assert logger.experiment.config["hparams"] == {"model": {"dim": 8}}
    assert logger.experiment.config["learning_rate"] == 0.1
    assert logger.experiment.summary["found"] == 3
    assert logger.experiment.id == logger.version


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

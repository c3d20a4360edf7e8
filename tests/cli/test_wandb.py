"""W&B: offline without a key, and no question asked."""

import json
import pickle
from pathlib import Path
from unittest import mock

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger

from lit_efficient import ConfigurationError
from lit_efficient.__main__ import main
from lit_efficient.cli.preflight import go_offline_without_key
from lit_efficient.cli.tree import flat
from lit_efficient.cli.wandb_exports import Training, log_export
from lit_efficient.files.runs import real
from lit_efficient.internals.lightning_wandb import begin_late
from tests.cli.toy_runs import OVERLAYS, fit
from tests.support_cli import Recorder
from tests.wandb_file import config_of, ids_of, records, written

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


def newest(run: Path) -> Path:
    """The newest folder of W&B's in the folder of a run."""
    return max((run / "wandb").glob("offline-run-*"), key=lambda one: one.stat().st_mtime_ns)


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
    sync = Path(next(line.split()[-1] for line in shown.out.splitlines() if "wandb sync " in line))
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
    (model,) = models
    assert model.name == f"model-{experiment.id}"
    assert {"latest", "last", "best"} <= {*model.aliases}

    again = ["--ckpt_path", "last", "--trainer.max_epochs", "3"]  # the same run of W&B goes on
    assert fit(*WANDB, *ours, f"https://me:{SECRET}@there", "--model.hidden=5", *again) == 0
    assert ids_of(written(newest(run))) == [experiment.id]


@pytest.mark.turns(4, family="whole programs")
def test_an_export_is_an_artifact_that_names_its_training_and_its_checkpoint(offline, capsys):
    assert fit(*WANDB, "--trainer.logger.log_model", "true", "--trainer.logger.id", "chosen") == 0
    run = real(Path("runs/base/latest"))
    trained = written(newest(run))
    assert ids_of(trained) == ["chosen"]
    capsys.readouterr()
    assert main(["export", str(run / "last.ckpt"), "--output", "weights", "--no_check", "--wandb"]) == 0
    sync = Path(capsys.readouterr().out.rpartition("wandb sync ")[2].splitlines()[0].strip())
    assert sync == newest(run)
    exported = list(records(written(sync)))
    (of_export,) = (one.run for one in exported if one.WhichOneof("record_type") == "run")
    assert (of_export.job_type, of_export.project) == ("export", "lit_efficient")
    assert of_export.run_id != "chosen"
    (artifact,) = (one.artifact for one in exported if one.WhichOneof("record_type") == "artifact")
    assert artifact.name == "export-safetensors-chosen"
    assert {file.path for file in artifact.manifest.contents} == {one.name for one in Path("weights").iterdir()}
    about = json.loads(artifact.metadata)
    assert (about["run"], about["checkpoint"]) == ("lit_efficient/chosen", "last.ckpt")
    (model,) = (one.artifact for one in records(trained) if one.artifact.type == "model")  # what the fit has uploaded
    assert about["input"] in {f"lit_efficient/{model.name}:{alias}" for alias in model.aliases}


@pytest.mark.parametrize("is_uploaded", [True, False])
def test_online_an_uploaded_checkpoint_is_the_input_of_an_export(is_uploaded, monkeypatch, tmp_path):
    import wandb

    run = mock.MagicMock(offline=False, url="https://there")
    run.__enter__.return_value = run
    monkeypatch.setattr(wandb, "init", lambda **options: run)
    monkeypatch.setattr(wandb, "Api", lambda: mock.Mock(artifact_exists=lambda name, type: is_uploaded))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").touch()
    training = Training("mine", None, "chosen", tmp_path / "last.ckpt", "model-chosen")
    said = log_export(training, tmp_path / "weights", "safetensors")
    assert run.use_artifact.call_args_list == [mock.call("mine/model-chosen:last")] * is_uploaded
    assert ("was not uploaded" in said) is not is_uploaded


def test_an_export_that_no_run_of_wandb_trained_is_refused_before_it_is_written(capsys):
    assert fit("--trainer.enable_checkpointing", "true") == 0
    for checkpoint in ("runs/base/latest/last.ckpt", "elsewhere.ckpt"):
        assert main(["export", checkpoint, "--output", "weights", "--wandb"]) == 2
        assert "is not the folder of a fit that a WandbLogger recorded" in capsys.readouterr().err
        assert not Path("weights").exists()


def test_with_another_config_a_new_run_of_wandb_begins(offline):
    """``--ckpt_path last`` goes on in the run of the checkpoint only if the config is the same."""
    assert fit(*WANDB) == 0
    first = ids_of(written(newest(real(Path("runs/base/latest")))))
    assert fit(*WANDB, "--ckpt_path", "last", "--trainer.max_epochs", "3") == 0
    assert ids_of(written(newest(real(Path("runs/base/latest"))))) == first
    assert fit(*WANDB, "--ckpt_path", "last", "--trainer.max_epochs", "4", "--model.scale", "2") == 0
    assert ids_of(written(newest(real(Path("runs/base/latest"))))) != first
    assert len(list(Path().rglob("offline-run-*"))) == 3


def test_the_recorded_command_line_has_no_secrets(offline, monkeypatch):
    talks = f"{{class_path: tests.cli.test_wandb.Talks, init_args: {{api_key: {SECRET}}}}}"
    words = ["--trainer.callbacks+", talks, f"--trainer.logger.notes=https://me:{SECRET}@there", "--model.scale", "2"]
    monkeypatch.setattr("sys.argv", ["lit_efficient", "fit", *WANDB, *words])
    assert fit(*WANDB, *words) == 0
    file = written(newest(real(Path("runs/base/latest"))))
    seen = [word for one in records(file) for word in one.environment.args]
    assert seen[-2:] == ["--model.scale", "2"]
    assert "--trainer.logger.notes=***" in seen
    assert all(SECRET not in word for word in seen)


class OwnLogger(WandbLogger):
    """A logger of the user's that adds to each row."""

    def log_metrics(self, metrics, step=None) -> None:
        super().log_metrics({**metrics, "own": 1.0}, step)


class EagerLogger(WandbLogger):
    """A logger of the user's whose run begins with it."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.experiment.tags = ["eager"]


@pytest.mark.parametrize("kind", [OwnLogger, EagerLogger])
def test_a_logger_of_ones_own_records_the_whole_config(kind, offline):
    own = ["--trainer.logger", f"{{class_path: tests.cli.test_wandb.{kind.__name__}, init_args: {{project: mine}}}}"]
    own += ["--trainer.enable_checkpointing", "true", "--model.hidden", "5"]
    talks = "{class_path: tests.cli.test_wandb.Talks, init_args: {place: on_fit_start}}"
    assert fit(*own, "--trainer.callbacks+", talks) == 2
    wandb_runs = list(Path().rglob("offline-run-*"))
    assert len(wandb_runs) == (kind is EagerLogger)
    import wandb

    wandb.finish()
    assert fit(*own) == 0
    logger = Recorder.last.trainer.logger
    assert isinstance(logger, kind)
    file = written(Path(logger.experiment.dir).parent)
    found = config_of(file)
    assert found["model"]["class_path"] == "tests.support_cli.ToyModel"
    assert flat(found)["model.hidden"] == 5
    rows = [one.history for one in records(file) if one.WhichOneof("record_type") == "history"]
    assert any("own" in (item.key or item.nested_key[0]) for row in rows for item in row.item) == (kind is OwnLogger)


@pytest.mark.parametrize("kind", [WandbLogger, OwnLogger])
def test_a_logger_is_pickled_with_its_run(kind, offline):
    """A strategy that spawns processes pickles the trainer: they attach to the same run."""
    logger = kind(project="mine", save_dir=".", offline=True)
    begin_late(logger, lambda value: value)
    logger.log_config({"seed_everything": 0})
    other = pickle.loads(pickle.dumps(logger))
    assert isinstance(other, kind)
    assert (other.version, other.has_begun) == (logger.experiment.id, True)


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

from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_efficient.internals import lightning_wandb
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import module, rows, trainer
from tests.wandb_file import records, written

WANDB = "lightning.pytorch"


@pytest.fixture
def logger(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")  # WandbLogger refuses log_model together with offline=True
    from lightning.pytorch.loggers import WandbLogger

    made = WandbLogger(save_dir=tmp_path, log_model="all")
    lightning_wandb.begin_late(made, lambda value: value)
    yield made
    if made.has_begun:
        made.experiment.finish()


@leans_on("lightning", "WandbLogger._experiment, _id, _wandb_init", "lightning_wandb")
def test_a_run_begins_when_it_is_used_under_the_id_that_was_known(logger, tmp_path):
    name = logger.version
    assert name
    logger.experiment.config.update({"seen": 1})
    assert not list(tmp_path.rglob("*.wandb"))
    logger.log_metrics({"x": 1.0}, step=0)
    assert logger.experiment.id == name == logger.version
    assert logger.experiment.config["seen"] == 1


@leans_on("lightning", "_logger of a run that has not begun, and _convert_params", "lightning_wandb")
def test_hyperparameters_of_a_name_in_the_config_are_recorded_below_hparams(logger):
    logger.log_config({"model": {"rate": 1}})
    logger.log_hyperparams({"model": 2, "other": 3})
    config = dict(logger.begin().config)
    assert config["model"] == {"rate": 1}
    assert config["other"] == 3
    assert config["hparams"] == {"model": 2}


@leans_on("lightning", "_scan_checkpoints, WandbLogger._logged_model_time and _checkpoint_name", "lightning_wandb")
def test_a_checkpoint_is_uploaded_once(logger, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path / "saved", save_last="link", save_top_k=1)
    run = trainer(WANDB, logger=logger, enable_checkpointing=True, callbacks=[saver])
    run.fit(module(WANDB), rows(), rows(1))
    logger.experiment.finish()
    file = written(Path(logger.experiment.dir).parent)
    assert len([record for record in records(file) if record.artifact.type == "model"]) == 1


def test_each_name_of_a_checkpoint_is_an_alias(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import WandbLogger

    best = tmp_path / "step2.ckpt"
    last = tmp_path / "last.ckpt"
    best.write_bytes(b"weights")
    last.hardlink_to(best)
    saver = SimpleNamespace(monitor="loss", best_model_path=str(best), last_model_path=str(last), current_score=1.0)
    saver.best_model_score = 1.0
    saver.best_k_models = {str(best): 1.0}
    logger = WandbLogger(mode="disabled", log_model=True, checkpoint_name="mine")
    lightning_wandb.begin_late(logger, lambda value: value)
    logged = []
    monkeypatch.setattr(logger.begin(), "log_artifact", lambda artifact, aliases: logged.append((artifact, aliases)))
    logger._scan_and_log_checkpoints(saver)
    logger._scan_and_log_checkpoints(saver)
    ((artifact, aliases),) = logged
    assert artifact.name == "mine"
    assert sorted(aliases) == ["best", "last", "latest", "step2"]  # an export of either file finds it

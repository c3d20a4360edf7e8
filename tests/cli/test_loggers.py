"""Overlays of loggers write what they should with the real packages, without a network."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lit_efficient.files.runs import real
from tests.cli.toy_runs import ALLOW, OVERLAYS, fit

SAVES = ["--trainer.enable_checkpointing", "true", "--trainer.log_every_n_steps", "1"]


def logged(name: str, *more: str) -> Path:
    assert fit("-c", str(OVERLAYS / f"loggers/{name}.yaml"), *SAVES, *more) == 0
    return real(Path("runs/base/latest"))


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [one["values"]["val/loss"] for one in events if "val/loss" in one.get("values", {})]


@pytest.mark.filterwarnings("ignore:.*noload.*")  # of SQLAlchemy, as MLflow uses it
def test_mlflow_has_the_metrics_and_a_resumed_run_goes_on():
    mlflow = pytest.importorskip("mlflow")
    run = logged("mlflow")
    assert logged("mlflow", "--ckpt_path", "last", "--trainer.max_epochs", "3") == run
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'lit_efficient'")
    (recorded,) = client.search_runs([experiment.experiment_id])
    values = [one.value for one in client.get_metric_history(recorded.info.run_id, "val/loss")]
    assert values == pytest.approx(losses(run))
    assert len(values) == 3
    assert json.loads((run / "run.json").read_text())["loggers"] == [recorded.info.run_id]
    assert recorded.data.params["hidden"] == "4"


@pytest.mark.nightly
def test_comet_writes_an_archive_offline(monkeypatch):
    """In a process of its own: Comet writes the archive at its end."""
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    words = [*ALLOW, "-c", "base.yaml", "-c", "loggers/comet", *SAVES]
    code = f"import sys; sys.path = {sys.path}; from lit_efficient.__main__ import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, "fit", *words], check=True, capture_output=True)
    (archive,) = Path(".cometml-runs").glob("*.zip")
    subprocess.run([sys.executable, "-c", code, "check", *words], check=True, capture_output=True)
    assert [*Path(".cometml-runs").glob("*.zip")] == [archive]  # a check begins no experiment
    with zipfile.ZipFile(archive) as files:
        text = files.read("messages.json").decode()
    values = losses(real(Path("runs/base/latest")))
    found = [json.loads(line)["payload"] for line in text.splitlines()]
    metrics = [one["metric"] for one in found if one.get("metric", {}).get("metricName") == "val/loss"]
    assert [float(one["metricValue"]) for one in metrics] == pytest.approx(values)


def test_tensorboard_has_the_metrics():
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = logged("tensorboard")
    (file,) = run.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert [one.value for one in events.Scalars("val/loss")] == pytest.approx(losses(run))


def test_csv_has_the_metrics():
    run = logged("csv")
    rows = (run / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/loss")
    assert [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]] == pytest.approx(losses(run))

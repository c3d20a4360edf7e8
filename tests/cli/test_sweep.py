"""Tests of ``sweep``: the grid, its runs and table, resuming, Optuna's points, groups of W&B, and what is refused."""

import contextlib
import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from lit_efficient.__main__ import main
from lit_efficient.commands import sweep
from lit_efficient.commands.sweep import Range, read_grid
from lit_efficient.files.events import EVENTS
from lit_efficient.files.runs import real
from tests.cli.toy_runs import ALLOW
from tests.support_cli import ToyData
from tests.wandb_file import records, written

SAVES = ["--trainer.enable_checkpointing", "true"]


class InThisProcess:
    """Stands for the process of a fit, which would import torch again."""

    started: list[dict[str, str]]

    def __init__(self, words, stdout, env, **_):
        InThisProcess.started.append(env)
        output = open(os.dup(stdout.fileno()), "w")  # noqa: SIM115 - closed by the next line
        with output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                self.returncode = main(words[3:])
            except RuntimeError:
                self.returncode = 1

    def poll(self):
        return self.returncode

    def terminate(self):
        pass

    wait = terminate


@pytest.fixture
def here(monkeypatch):
    InThisProcess.started = []
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}
    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(Popen=InThisProcess, **names))
    monkeypatch.setattr(sweep, "_POLL_S", 0.0)


class Stops(Callback):
    """Fails at a step of the first run.

    Args:
        step: The step.
    """

    def __init__(self, step: int = 6) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step and not Path("stopped").exists():
            Path("stopped").touch()
            raise RuntimeError("stopped")


def swept(*words: str) -> int:
    return main(["sweep", *ALLOW, "-c", "base.yaml", *words])


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("runs/sweep/base/sweep.csv").read_text().splitlines()))


@pytest.mark.turns(2, family="whole comparisons")
def test_each_point_runs_once_and_the_best_is_marked(here, capsys):
    grid = ["--grid", "model.hidden=2,4", "--grid", "model.scale=1,0.0"]
    assert swept(*grid) == 0
    rows = table()
    assert [(row["model.hidden"], row["model.scale"]) for row in rows] == [
        ("2", "1"), ("2", "0.0"), ("4", "1"), ("4", "0.0"),
    ]  # fmt: skip
    assert [float(row["val/loss"]) == 0 for row in rows] == [False, True, False, True]
    assert [row["best"] for row in rows] == ["", "best", "", ""]
    assert {row["ended"] for row in rows} == {"done"}
    for row in rows:
        assert f"hidden: {row['model.hidden']}\n" in Path(row["run"], "config.yaml").read_text()
    shown = capsys.readouterr()
    assert "--model.hidden=2 --model.scale=0.0" in shown.out
    assert "4 runs, of which 0 have ended" in shown.err
    page = Path("runs/sweep/base/report.html").read_text()
    assert all(Path(row["run"]).parent.name in page for row in rows)
    # More values add runs, and finished ones stay as they are.
    assert swept("--grid", "model.hidden=2,3", "--grid", "model.scale=1,0.0", "--mode", "max") == 0
    assert len(InThisProcess.started) == 6
    assert "4 runs, of which 2 have ended" in capsys.readouterr().err
    again = table()
    assert [row["run"] for row in again[:2]] == [row["run"] for row in rows[:2]]
    assert max(again, key=lambda row: float(row["val/loss"]))["best"] == "best"
    # Another config runs anew.
    assert swept(*grid, "--trainer.max_epochs", "1") == 0
    assert len(InThisProcess.started) == 10


@pytest.mark.turns(2, family="whole comparisons")
def test_an_interrupted_run_resumes_from_its_checkpoint(here, capsys):
    stops = "{class_path: tests.cli.test_sweep.Stops}"
    words = ["--grid", "model.hidden=3", *SAVES, "--trainer.callbacks+", stops]
    assert swept(*words) == 1
    assert table()[0]["ended"] == "failed with code 1"
    assert swept(*words) == 0
    (row,) = table()
    assert row["ended"] == "done"
    events = Path(row["run"], EVENTS).read_text()
    assert events.count('"kind": "start"') == 2
    assert '"step": 4, "kind": "start", "parent": null, "resumed": true' in events
    assert "continues" in capsys.readouterr().err


def test_one_run_on_each_gpu(here, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert sweep._devices({"accelerator": "cpu"}) == [""]
    assert sweep._devices({"accelerator": "auto", "devices": 2}) == [""]
    devices = sweep._devices({"accelerator": "gpu", "devices": "auto"})
    assert devices == ["4", "7"]
    monkeypatch.setattr(sweep, "_devices", lambda trainer: devices)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert swept("--grid", "model.hidden=2,3,4", "--trainer.max_epochs", "1") == 0
    assert [env["CUDA_VISIBLE_DEVICES"] for env in InThisProcess.started] == ["4", "7", "4"]
    assert "one on each of 2 GPUs" in capsys.readouterr().err


def test_a_run_that_diverges_does_not_end_the_others(here):
    diverges = "{class_path: NonFiniteGuard}"
    assert swept("--grid", "model.scale=1e38,1", "--trainer.callbacks+", diverges) == 0
    assert [row["ended"] for row in table()] == ["diverged", "done"]
    assert table()[1]["best"] == "best"
    assert swept("--grid", "model.scale=1e38,1", "--trainer.callbacks+", diverges) == 0
    assert len(InThisProcess.started) == 2


@pytest.mark.turns(2, family="whole comparisons")
def test_optuna_chooses_points_and_goes_on(here, capsys):
    optuna = pytest.importorskip("optuna")
    grid = ["--grid", "model.hidden=1..8:log", "--grid", "model.scale=0.5..2.0", "--grid", "data.rows=4,8"]
    assert swept(*grid, "--trials", "2", "--trainer.max_epochs", "1") == 0
    assert swept(*grid, "--trials", "3", "--trainer.max_epochs", "1") == 0
    assert "3 runs, of which 2 have ended" in capsys.readouterr().err
    rows = table()
    assert len(rows) == len(InThisProcess.started) == len({row["model.scale"] for row in rows}) == 3
    assert all(1 <= int(row["model.hidden"]) <= 8 and 0.5 <= float(row["model.scale"]) <= 2 for row in rows)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("runs/sweep/base/optuna.log"))
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    assert [trial.value for trial in trials] == pytest.approx([float(row["val/loss"]) for row in rows], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "model.hiden=2"], "did you mean 'hidden'"),
        (["--grid", "model.hidden=2,0"], "hidden must be at least 1"),
        (["--grid", "model.hidden=2,many"], "many is not allowed"),
        (["--grid", "model.hidden=2,2"], "each value once"),
        (["--grid", "model.hidden=2", "--grid", "model.hidden=3"], "each key"),
        (["--grid", "model.hidden"], "KEY=VALUE"),
        (["--grid", "model.hidden=2,"], "KEY=VALUE"),
        (["--grid", "ckpt_path=a,b"], "ckpt_path"),
        (["--grid", "model.hidden=1..4"], "--trials"),
        (["--grid", "model.hidden=4..1", "--trials", "2"], "LOW below HIGH"),
        (["--grid", "model.hidden=0..4:log", "--trials", "2"], "above 0"),
        (["--grid", "model.hidden=a..b", "--trials", "2"], "range of numbers"),
        (["--grid", "model.hidden=0..4", "--trials", "2"], "hidden must be at least 1"),
        (["--grid", "model.hidden=2", "--trials", "0"], "--trials"),
        (["--grid", "model.hidden=2", "-c", "nothing"], "nothing"),
    ],
)
def test_what_is_wrong_is_refused_before_the_first_run(here, capsys, words, said):
    if "--trials" in words:
        pytest.importorskip("optuna")
    assert swept(*words) == 2
    error = capsys.readouterr().err
    assert said in error[error.index("error: ") :]
    assert "Traceback" not in error
    assert ToyData.touched == 0
    assert not InThisProcess.started
    assert not Path("runs").exists()


def test_values_of_a_grid():
    assert read_grid(["--a.b-c=[1,2],[3]", "lr=1e-5..1e-3:log", "n=1..4", "x={a: 1, b: 2},true"]) == {
        "a.b_c": ["[1,2]", "[3]"],
        "lr": Range(1e-5, 1e-3, True),
        "n": Range(1, 4),
        "x": ["{a: 1, b: 2}", "true"],
    }


@pytest.mark.turns(4, family="whole programs")
def test_sigterm_ends_the_runs_too_and_wandb_groups_them(monkeypatch):
    """The program is interrupted in the middle of a run, which saves a checkpoint."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = ["--trainer.logger", "{class_path: WandbLogger, init_args: {project: mine, offline: true}}"]
    words = [*ALLOW, "-c", "base.yaml", "--grid", "model.hidden=3", *SAVES, "--trainer.max_epochs", "20000"]
    command = [sys.executable, "-m", "lit_efficient", "sweep", *words, *logger]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        events = wait_for("runs/sweep/base/*/latest/events.jsonl", "metrics")
        program.terminate()
        program.communicate(timeout=60)
    assert program.returncode == 128 + 15
    assert '"reason": "signal 15"' in events.read_text()
    run = real(events.parent)
    assert list(run.glob("*.ckpt"))
    (folder,) = run.glob("wandb/offline-run-*")
    (of_wandb,) = (one.run for one in records(written(folder)) if one.WhichOneof("record_type") == "run")
    assert (of_wandb.run_group, of_wandb.display_name) == ("base", "hidden=3")


def wait_for(pattern: str, text: str) -> Path:
    for _ in range(600):
        for path in Path().glob(pattern):
            if text in path.read_text():
                return path
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} with {text}")

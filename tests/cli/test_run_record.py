"""A run's folder tells what happened: events, log, environment, and what each of them has after kills and resumes."""

import csv
import io
import json
import math
import shlex
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lit_efficient.cli import LitEfficientCLI
from lit_efficient.cli.environment import environment
from lit_efficient.cli.run_log import RunLog
from lit_efficient.files.events import open_events, write_event
from tests.cli.toy_runs import fit
from tests.support_cli import ToyData, ToyModel

RUN = Path("runs/base/latest")
SAVE = ["--trainer.enable_checkpointing=true"]
BEST = "{class_path: ModelCheckpoint, init_args: {monitor: val/loss, filename: best}}"
KEEP = [*SAVE, f"--trainer.callbacks+={BEST}", "--trainer.logger=CSVLogger", "--trainer.log_every_n_steps=2"]


def events(folder=RUN, kind=None):
    read = [json.loads(line, parse_constant=pytest.fail) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in read if kind in (None, event["kind"])]


class Tells(Callback):
    """Prints, warns, samples; logs what is no number, directly to the logger."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            print("\rbar 1/3", end="")
            print("\r       \r", end="")
            print("\x1b[31mred\x1b[0m words")
            warnings.warn("mind the step", stacklevel=1)
            for logger in trainer.loggers:
                logger.log_metrics({"odd": math.nan, "huge": torch.tensor(math.inf), "text": "none"}, step=2)

    def on_validation_end(self, trainer, module):
        if trainer.sanity_checking:
            return
        (Path(trainer.default_root_dir) / "samples").mkdir(exist_ok=True)
        (Path(trainer.default_root_dir) / f"samples/step_{trainer.global_step}.txt").write_text("x")


@pytest.mark.filterwarnings("default:mind")
def test_events_say_what_happened_and_agree_with_the_table(capsys):
    assert fit(*KEEP, "--trainer.callbacks+=tests.cli.test_run_record.Tells", "--trainer.callbacks+=ExactResume") == 0
    printed = capsys.readouterr().out
    (start,), (end,) = events(kind="start"), events(kind="end")
    assert (start["step"], start["parent"], start["resumed"]) == (0, None, False)
    assert (end["step"], end["reason"]) == (8, "done")
    shown = [command.replace(Path("runs/base/latest").resolve().name, "latest") for command in end["next"]]
    assert [f"  {command}" in printed for command in shown] == [True] * 3
    (techniques,) = events(kind="techniques")
    assert [one["name"] for one in techniques["report"]] == ["ExactResume"]
    saved = [(event["step"], event["path"], event.get("monitor")) for event in events(kind="checkpoint")]
    assert {(4, "best.ckpt", "val/loss"), (8, "last.ckpt", None)} <= set(saved)
    assert all((RUN / path).is_file() for _, path, _ in saved)
    assert [event["path"] for event in events(kind="sample")] == ["samples/step_4.txt", "samples/step_8.txt"]
    assert [event["text"] for event in events(kind="warning")] == ["mind the step"]
    rows = list(csv.DictReader((RUN / "metrics.csv").read_text().splitlines()))
    for name in ("loss", "lr", "grad_norm", "val/loss"):
        noted = [event["values"][name] for event in events(kind="metrics") if name in event["values"]]
        assert noted == [float(row[name]) for row in rows if row[name]]
    steps = [event["step"] for event in events(kind="metrics") if "loss" in event["values"]]
    assert steps == [2, 4, 6, 8]
    assert [event["epoch"] for event in events(kind="metrics") if "val/loss" in event["values"]] == [0, 1]
    assert [event["values"] for event in events(kind="metrics") if "odd" in event["values"]] == [
        {"odd": None, "huge": None}
    ]
    log = (RUN / "log.txt").read_text()
    for said in ("red words\n", "last checkpoint", "python -m lit_efficient validate"):
        assert said in log, said
    assert not any(character in log for character in "\r\x1b")
    assert "bar 1/3" not in log
    assert "write" not in vars(sys.stdout)


def test_a_resumed_run_mends_the_torn_line_and_says_from_where_it_went_on():
    assert fit(*KEEP) == 0
    whole = events()
    with (RUN / "events.jsonl").open("ab") as file:
        file.write('{"time": 1, "step": 3, "kind": "metr\xc3'.encode("latin1"))
    assert fit(*KEEP, f"--ckpt_path={RUN}/last.ckpt", "--trainer.max_epochs=3") == 0
    assert events()[: len(whole)] == whole
    _, second = events(kind="start")
    assert (second["step"], second["resumed"]) == (8, True)
    assert events(kind="end")[-1]["step"] == 12
    kept, new = (json.loads((RUN / name).read_text()) for name in ("environment_1.json", "environment.json"))
    assert "max_epochs" not in kept["command"]
    assert "--trainer.max_epochs=3" in new["command"]
    log = (RUN / "log.txt").read_text()
    assert log.count("Done.") == 2
    assert fit(*KEEP, f"--ckpt_path={RUN}/last.ckpt", "--trainer.gradient_clip_val=1", "--trainer.max_epochs=4") == 0
    (begun,) = events(kind="start")
    assert (begun["step"], begun["resumed"]) == (12, False)
    assert begun["parent"].endswith("last.ckpt")


class Fails(Callback):
    def __init__(self, diverges: bool = False):
        self.diverges = diverges

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 2:
            if not self.diverges:
                raise RuntimeError("the cat has it")
            next(module.parameters()).grad.fill_(math.nan)


def test_a_run_that_fails_says_why(capsys):
    with pytest.raises(RuntimeError, match="the cat"):
        fit("--trainer.callbacks+=tests.cli.test_run_record.Fails")
    (end,) = events(kind="end")
    assert (end["reason"], end["step"], end["next"]) == ("error", 2, [])
    assert "RuntimeError: the cat has it" in (RUN / "log.txt").read_text()  # with its traceback
    failing = "{class_path: tests.cli.test_run_record.Fails, init_args: {diverges: true}}"
    assert fit(f"--trainer.callbacks+={failing}") == 4
    assert events(kind="end")[0]["reason"] == "diverged"
    assert "NonFiniteGuard" in (RUN / "log.txt").read_text()


def test_without_loggers_validations_are_noted_all_the_same():
    assert fit() == 0
    assert [(event["step"], list(event["values"])) for event in events(kind="metrics")] == [
        (4, ["loss", "val/loss"]),
        (8, ["loss", "val/loss"]),
    ]


@pytest.mark.filterwarnings("default:mind")
def test_quiet_leaves_warnings_errors_and_the_last_lines(capsys):
    assert fit("--quiet", *KEEP, "--trainer.callbacks+=tests.cli.test_run_record.Tells") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == ["", "Done."]
    assert "Next:" in captured.out
    assert [line for line in captured.err.splitlines() if "mind" not in line and "warn" not in line] == []
    log = (RUN / "log.txt").read_text()
    assert "red words" in log
    assert fit("--quiet", "--trainer.max_epochs=0.5") == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert (
        fit(
            "--quiet", "--trainer.callbacks+={class_path: tests.cli.test_run_record.Fails, init_args: {diverges: true}}"
        )
        == 4
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not finite" in captured.err


def test_a_script_that_names_its_classes_has_all_of_it(monkeypatch):
    """Its parser has the arguments of trainer, model and data at once."""
    words = ["own.py", "fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    monkeypatch.setattr("sys.argv", words)
    LitEfficientCLI(ToyModel, ToyData)
    run = Path("runs/run/latest")
    validate, *_ = events(run, "end")[0]["next"]
    assert validate.startswith("python own.py validate -c runs/run/")
    monkeypatch.setattr("sys.argv", shlex.split(validate)[1:])
    LitEfficientCLI(ToyModel, ToyData)
    command = json.loads((run / "environment.json").read_text())["command"]
    assert command.endswith("own.py fit --trainer.max_epochs=1 --trainer.accelerator=cpu --trainer.logger=false")


def test_the_environment_names_commit_and_changes(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    assert environment(torch.device("cpu"), [0], "x")["commit"] is None
    git("init")
    git("add", "base.yaml")
    git("commit", "-m", "x")
    found = environment(torch.device("cpu"), [0], "x")
    assert not found["commit"]["dirty"]
    assert len(found["commit"]["id"]) == 40
    assert found["packages"]["torch"] == version("torch")
    assert {"lightning", "numpy", "safetensors"} <= found["packages"].keys()
    assert found["devices"][0]
    Path("base.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert environment(torch.device("cpu"), [0], "x")["commit"]["dirty"]
    monkeypatch.setenv("PATH", "")  # no git
    assert environment(torch.device("meta"), [0, 1], "x")["devices"] == ["meta", "meta"]


def test_a_disk_that_is_full_tears_no_line_and_ends_no_run(tmp_path, monkeypatch):
    write_event(tmp_path, "end", 1)
    assert not list(tmp_path.glob("events.jsonl"))  # of no run
    open_events(tmp_path)
    real = __import__("os").write
    monkeypatch.setattr("lit_efficient.files.events.os.write", lambda file, data: real(file, data[:10]))
    write_event(tmp_path, "end", 1)
    monkeypatch.undo()
    write_event(tmp_path, "end", 2, odd="\udcff", path=tmp_path)
    (event,) = events(tmp_path)
    assert (event["step"], event["odd"], event["path"]) == (2, "?", str(tmp_path))


def test_streams_that_cannot_be_watched_and_lines_without_an_end(tmp_path, monkeypatch):
    class Fixed:
        __slots__ = ("text",)

        def write(self, text):
            self.text = text

    fixed, plain = Fixed(), io.StringIO()
    monkeypatch.setattr("sys.stdout", fixed)
    monkeypatch.setattr("sys.stderr", plain)
    log = RunLog("")
    print("half", end="", file=sys.stderr)
    log.open(tmp_path / "log.txt", 1)
    print(" and half", file=sys.stderr)
    for percent in range(3):
        print(f"{percent} %", end="\r", file=sys.stderr)
    print("all of it\r\n\x1b[32mgreen\x1b[0m", file=sys.stderr)
    print("." * 30_000, file=sys.stderr)
    print("unseen")
    log.stop()
    print("later", file=sys.stderr)
    half, all_of_it, green, dots = (tmp_path / "log.txt").read_text().splitlines()
    assert (half, all_of_it, green) == ("[rank 1] half and half", "[rank 1] all of it", "[rank 1] green")
    assert 5_000 < len(dots) <= 30_009
    assert plain.getvalue().startswith("half and half\n0 %\r1 %\r2 %\rall of it")
    assert plain.getvalue().endswith("..\nlater\n")
    log = RunLog("")
    log.open(tmp_path / "no" / "log.txt", 0)
    print("x", file=sys.stderr)
    log.stop()

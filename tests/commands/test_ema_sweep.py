"""ema-sweep with the data: a real run, its snapshots, and for each width the loss that a validation by hand gives."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image

from lit_efficient import ConfigurationError, CorpusFiles, LanguageModeling, PythonCorpus
from lit_efficient.__main__ import main
from lit_efficient.commands import ema_sweep
from lit_efficient.commands.ema_sweep import WidthCurve, loss_among
from lit_efficient.export import check
from lit_efficient.mechanisms.averages.snapshots import Snapshot, synthesize, write_snapshot
from lit_efficient.models.networks.gpt import GPTConfig

MODEL = {"dim": 16, "depth": 1, "num_heads": 2, "max_length": 16}
DATA = {"vocab_size": 300, "sequence_length": 16, "batch_size": 8, "val_fraction": 0.2}


def config(folder: Path) -> dict:
    source = folder / "source"
    source.mkdir()
    for index in range(30):
        text = f"def function_{index}(self):\n    return self.value + {index}\n\n\n"
        (source / f"file{index}.py").write_text(text * 4)
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 60,
            "logger": {"class_path": "CSVLogger"},
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {"class_path": "PowerEMA", "init_args": {"snapshot_every_n_steps": 3}},
                {"class_path": "EMA", "init_args": {"decay": 0.9}},  # its average must not stand in for any weights
                {"class_path": "SampleText", "init_args": {"prompts": ["def"], "max_new_tokens": 2}},
            ],
        },
        "model": {"class_path": "LanguageModeling", "init_args": {"model": MODEL}},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.05}},  # constant and high: averages help
        "data": {
            "class_path": "PythonCorpus",
            "init_args": {**DATA, "files": {"paths": [str(source)]}, "prompts": ["def"]},
        },
    }


def by_hand(raw: dict[str, torch.Tensor], average: dict[str, torch.Tensor], settings: dict) -> float:
    """The validation loss of an average, from nothing but the classes."""
    arguments = settings["data"]["init_args"]
    corpus = PythonCorpus(**arguments | {"files": CorpusFiles(**arguments["files"])})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
    module = LanguageModeling(GPTConfig(**MODEL))
    run.validate(module, datamodule=corpus, verbose=False)  # it builds the network
    module.load_state_dict(raw)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(average.get(name, p))
    return run.validate(module, datamodule=corpus, verbose=False)[0]["val/loss"]


def test_the_losses_are_those_of_a_validation_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "-c", "run.yaml"]) == 0
    run = Path("runs/run/latest").resolve()
    last = run / "last.ckpt"
    files = {path for path in run.rglob("*") if path.is_file()}
    given = ["-c", str(run / "config.yaml"), "--checkpoint", str(last), "--output", "sweep"]
    assert main(["ema-sweep", str(run / "snapshots"), "--sigma_rel", "0.2", "0.05", *given]) == 0
    assert {path for path in run.rglob("*") if path.is_file()} == files  # the run's folder is as it was
    assert {path.name for path in Path("sweep").iterdir()} == {
        *("ema-sweep.csv", "ema-sweep.png", "ema-sigma_rel=0.05.ckpt", "ema-sigma_rel=0.2.ckpt")
    }

    rows = list(csv.DictReader(io.StringIO(Path("sweep/ema-sweep.csv").read_text())))
    assert [(row["sigma_rel"], row["step"]) for row in rows] == [("0.05", "60"), ("0.2", "60"), ("", "60")]
    raw = torch.load(last, weights_only=True)["state_dict"]
    averages = synthesize(run / "snapshots", [0.05, 0.2])
    expected = [by_hand(raw, average, settings) for average in (*averages, {})]
    assert [float(row["val/loss"]) for row in rows] == expected
    assert len(set(expected)) == 3

    said = capsys.readouterr().out
    best = min(zip(expected, ("0.05", "0.2", "none")))[1]
    assert best == "0.2"  # the rate is constant and high
    assert [line.split()[0] for line in said.splitlines() if line.endswith(" best")] == [best]
    image = np.asarray(Image.open("sweep/ema-sweep.png").convert("RGB"))
    assert image.shape == (630, 1080, 3)
    assert (image == (194, 65, 12)).all(-1).sum() > 100  # the ring around the best width


def test_what_cannot_be_validated_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(config(tmp_path)))
    Path("snapshots").mkdir()
    Path("snapshots", "average-step=00000004-sigma_rel=0.1.safetensors").touch()
    command = ["ema-sweep", "snapshots", "--sigma_rel", "0.1"]
    assert main([*command, "-c", "run.yaml"]) == 2
    assert "--config needs --checkpoint, a checkpoint of the run" in capsys.readouterr().err
    assert main([*command, "-c", "run.yaml", "--checkpoint", "last.ckpt", "--trainer.limit_val_batch", "3"]) == 2
    assert "did you mean 'trainer.limit_val_batches'" in capsys.readouterr().err
    assert main([*command, "--trainer.limit_val_batches", "3"]) == 2
    assert "options of a validation need --config" in capsys.readouterr().err
    assert [path.name for path in Path("snapshots").iterdir()] == ["average-step=00000004-sigma_rel=0.1.safetensors"]


def test_what_a_killed_sweep_or_check_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    write_snapshot(tmp_path, Snapshot(1, 0.1), {"w": torch.ones(2)})
    (tmp_path / "latest").write_text(".")  # as where there are no links: the folder has two names
    asked = ["ema-sweep", str(tmp_path / "latest"), "--sigma_rel", "0.1"]
    nothing = check.Reference({}, torch.ones(1), 1.0)
    for killed in (
        lambda: patched(ema_sweep, "_build", asked),
        lambda: check.check_outputs(tmp_path / "x", "peft", nothing, {}, lambda _: os._exit(9)),
    ):
        if not (child := os.fork()):
            killed()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len([*tmp_path.glob(".*.partial")]) == 2
    assert main(asked) == 0
    names = ["average-step=00000001-sigma_rel=0.1.safetensors", "ema-sigma_rel=0.1.safetensors", "latest"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def patched(module: Any, name: str, argv: list[str]) -> None:
    """Run a command that is killed where it would call a function."""
    setattr(module, name, lambda *_: os._exit(9))
    main(argv)


def test_the_metric_is_named_or_clear() -> None:
    assert loss_among(["val/loss", "val/aux_loss", "val/accuracy"]) == "val/loss"
    assert loss_among(["accuracy", "my_loss"]) == "my_loss"
    with pytest.raises(ConfigurationError, match=r"Add --metric NAME; logged: a_loss, b_loss"):
        loss_among(["b_loss", "a_loss"])
    with pytest.raises(ConfigurationError, match=r"--metric must be one that the validation logs .a., got 'b'"):
        WidthCurve({0.1: {"a": 1.0}}, {"a": 1.0}, "b", 4)


def test_the_table_says_where_to_look_next() -> None:
    def table(*losses: float, raw: float = 1.0) -> str:
        return WidthCurve({0.05 * (i + 1): {"l": x} for i, x in enumerate(losses)}, {"l": raw}, "l", 4).table()

    assert "at the edge of the range: wider widths may be better" in table(0.9, 0.8)
    assert "at the edge of the range: narrower widths may be better" in table(0.8, 0.9)
    assert "No width is better than the weights without an average" in table(1.1, 1.2)
    assert "side" not in table(0.9, 0.8, 0.9)

"""Tests of the command ``tune``: an overlay that ``fit`` accepts, exit codes, and errors that name the option."""

import csv
from pathlib import Path

import pytest
import yaml

from lit_efficient.__main__ import main
from lit_efficient.commands.tune import _name
from tests.cli.toy_runs import ALLOW, BASE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes must be"),
        (["--device_memory", "lots"], "device_memory must be"),
        (["--output", "best.txt"], "--output must be"),
        (["--only", "Compil"], "did you mean 'Compile'"),
        (["--batch", "data.rows"], "data.rows"),
        (["-c", "no_such"], "no_such"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "-c", "latent_diffusion", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_name_of_the_configs():
    assert _name(["-c", "language_model", "--config=a/b.yaml", "--trainer.max_steps", "3"]) == "language_model+b"
    assert _name(["--model", "X"]) == "fit"


@pytest.mark.turns(2, family="whole searches")
def test_the_overlay_of_ones_own_task_trains_and_what_does_not_fit_ends_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    words = [*ALLOW, "-c", "base.yaml"]
    only = ["--only", "batch_size", "MemoryEfficientLayers", "--minutes", "3"]
    assert main(["tune", *words, "--device-memory", "1GiB", *only]) == 0
    told = capsys.readouterr()
    assert "effective batch 2" in told.out
    assert "left: 2 x 1: " in told.err
    overlay = Path("runs/tune/base.yaml")
    assert "# Overlay: " in overlay.read_text()
    found = yaml.safe_load(overlay.read_text())
    assert found["data"]["batch_size"] * found["trainer"]["accumulate_grad_batches"] == 2
    assert main(["fit", *words, "-c", str(overlay), "--trainer.max_steps", "1"]) == 0
    overlay.unlink()
    capsys.readouterr()
    assert main(["tune", *words, "--device-memory", "10B", *only, "--quiet"]) == 3
    told = capsys.readouterr()
    assert "Nothing fits" in told.out
    assert not told.err
    assert not overlay.exists()
    rows = csv.DictReader(Path("runs/tune/base/table.csv").read_text().splitlines())
    assert {row["state"] for row in rows} == {"too large", "refused"}
    monkeypatch.setattr("lit_efficient.evidence.tuning.tuning.Search.run", _interrupted)
    assert main(["tune", *words]) == 130
    assert "the same command continues" in capsys.readouterr().err


def _interrupted(search):
    raise KeyboardInterrupt

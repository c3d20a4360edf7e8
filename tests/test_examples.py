"""The examples run, and the one in Python is the one in YAML."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

from lit_efficient import EMA, ExactResume, LoRA, LowBitOptimizer, StochasticDepth
from lit_efficient.cli import LitEfficientCLI
from tests.support import assert_equal, weights

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "add_to_existing_code.yaml"
FIVE = [EMA, ExactResume, LoRA, LowBitOptimizer, StochasticDepth]


@pytest.mark.turns(4, family="whole programs")
def test_five_techniques_in_python_and_in_yaml_train_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / "examples" / "add_to_existing_code.py"))["main"](max_epochs=2, rows=256)
    tiny = ["--trainer.max_epochs=2", "--model.init_args.rows=256"]
    cli = LitEfficientCLI(args=["fit", "--config", str(CONFIG), "--allow-import", "examples", *tiny])
    for trainer in (script, cli.trainer):
        names = {type(callback).__name__ for callback in trainer.callbacks}
        assert names >= {technique.__name__ for technique in FIVE}
        assert trainer.global_step == 8
    assert_equal(weights(script.lightning_module), weights(cli.trainer.lightning_module))
    assert_equal(averages(script), averages(cli.trainer))


def averages(trainer) -> object:
    return next(callback for callback in trainer.callbacks if isinstance(callback, EMA)).state_dict()


def test_the_yaml_without_leave_to_import_is_refused(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    from lit_efficient.cli import run

    monkeypatch.syspath_prepend(str(ROOT))
    assert run(["fit", "--config", str(CONFIG)]) == 2
    assert "--allow-import examples" in capsys.readouterr().err


def test_the_yaml_has_five_entries() -> None:
    entries = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["trainer"]["callbacks"]
    assert sorted(entry["class_path"] for entry in entries) == sorted(technique.__name__ for technique in FIVE)

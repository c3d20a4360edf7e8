"""The overlays for many devices are built with their arguments, on one CPU; DeepSpeed's need its package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_efficient.cli import preflight
from tests.support_cli import Parts

FOLDER = Path(__file__).parents[2] / "configs" / "scale"
ZERO = sorted(FOLDER.glob("zero_*.yaml"))
TASK = ["--model", "lit_efficient.Autoencoding", "--data", "lit_efficient.DigitImages"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "check_devices", lambda *_: None)
    for name, value in {"PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


LLAMA = ["-c", "llm/llama_3_1_8b_qlora"]
BELOW = {"full_8b": LLAMA, "qlora_70b": LLAMA, "sdxl": []}  # what they are appended to


def built(path: Path) -> Any:
    return Parts(
        args=[
            "fit",
            *BELOW.get(path.stem, TASK),
            "-c",
            str(path),
            "--trainer.accelerator",
            "cpu",
            "--trainer.logger",
            "false",
        ]
    )


@pytest.mark.parametrize("path", sorted({*FOLDER.glob("*.yaml")} - {*ZERO}), ids=lambda path: path.stem)
def test_its_strategy_has_its_arguments(path: Path) -> None:
    trainer, written = built(path).trainer, yaml.safe_load(path.read_text("utf-8"))["trainer"]
    assert trainer.num_devices == written.get("devices", 1)
    assert trainer.num_nodes == written.get("num_nodes", 1)
    if path.stem == "slurm":
        assert written["plugins+"][0]["init_args"] == {"auto_requeue": False}
    if "strategy" in written:
        assert type(trainer.strategy).__name__ == written["strategy"]["class_path"]
        for name, value in written["strategy"]["init_args"].items():
            found = getattr(trainer.strategy, name)
            assert (vars(found).items() >= value.items()) if isinstance(value, dict) else found == value
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert {entry["class_path"] for entry in written.get("callbacks+", ())} <= set(names)
    assert names.count("LoRA") == (path.stem == "qlora_70b")
    assert not {"LowBitOptimizer", "SampleImages"} & set(names)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="it is installed")
@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.stem)
def test_without_deepspeed_a_sentence_says_so(path: Path) -> None:
    with pytest.raises(Exception, match=r"ZeroStrategy needs deepspeed: pip install"):
        built(path)

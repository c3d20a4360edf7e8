"""The examples run and do what they say, and the one that stands in Python and in YAML is the same in both."""

from __future__ import annotations

import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from lit_efficient import EMA, ExactResume, LoRA, LowBitOptimizer, StochasticDepth, restore
from lit_efficient.cli import LitEfficientCLI
from lit_efficient.testing import check_technique
from tests import notebooks
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


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A script's ``main``, in an empty folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def vision_transformer(example: Any) -> None:
    found = example("vision_transformer")
    trainer = found["main"](max_epochs=2)
    state = averages(trainer)
    assert state["updates"] == trainer.global_step == 48
    module = trainer.lightning_module
    module.load_state_dict(state["average"], strict=False)
    images, labels = found["digits"]()[1].tensors
    with torch.no_grad():
        accuracy = (module.eval()(images).argmax(-1) == labels).float().mean()
    assert torch.equal(trainer.callback_metrics["val/accuracy"], accuracy)


def own_transformer(example: Any) -> None:
    trainer = example("own_transformer")["main"](max_epochs=2)
    assert float(trainer.callback_metrics["train/loss"]) < 4.5  # bytes drawn blindly: 5.5


def gan(example: Any) -> None:
    found = example("gan")
    trainer = found["main"](max_epochs=2)
    restored = restore(found["GAN"](), trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
    with torch.no_grad():
        assert not torch.equal(restored.generator[0].weight, trainer.lightning_module.generator[0].weight)


def fabric_loop(example: Any) -> None:
    found = example("fabric_loop")["main"](epochs=4)
    assert found["last"] < found["first"] / 2
    assert found["state bytes"] < 12_808 * 3  # of two states in float32 it would be 8 bytes each


def plain_pytorch(example: Any) -> None:
    found = example("plain_pytorch")["main"](steps=60)
    assert found["last"] < found["first"] / 2


def distillation(example: Any) -> None:
    found = example("distillation")["main"](max_steps=200)
    assert min(found.values()) > 0.5


def average_afterwards(example: Any) -> None:
    found = example("average_afterwards")["main"](max_epochs=2)
    assert len(set(found.values())) > 1
    assert all(0 < accuracy <= 1 for accuracy in found.values())


def own_technique(example: Any) -> None:
    found = example("own_technique")
    found["main"]()
    with pytest.raises(AssertionError):  # what the check is worth
        check_technique(lambda: found["WeightClamp"](0.1), found["stays_small"])


def finetune_llm(example: Any) -> None:
    found = example("finetune_llm")
    found["write_conversations"](Path("talk"))
    trainer = found["main"]("talk", max_steps=6)
    assert trainer.global_step == 6
    assert float(trainer.callback_metrics["val/loss"]) < 7


def reinforcement_learning(example: Any) -> None:
    found = example("reinforcement_learning")["main"](".", sft_steps=30, max_steps=60, batch_size=32)
    assert found["after"]["digits"] > found["before"]["digits"] + 0.1  # of three seeds, 0.06 to at least 0.28


def diffusion_on_images(example: Any) -> None:
    found = example("diffusion_on_images")
    found["write_images"](Path("digits"), count=80)
    trainer = found["main"]("digits", max_steps=3)
    assert trainer.global_step == 3
    assert "val/loss" in trainer.callback_metrics
    assert Path("digits-runs/autoencoder.ckpt").is_file()


def wandb_sweep(example: Any) -> None:
    found = example("wandb_sweep")
    found["SWEEP"]["parameters"]["rate"]["values"] = [0.1]
    assert found["main"](max_epochs=1, offline=True).keys() == {0.1}
    assert list(Path("wandb").glob("offline-run-*"))


SCRIPTS = {
    check.__name__: check
    for check in (
        vision_transformer,
        own_transformer,
        gan,
        fabric_loop,
        plain_pytorch,
        distillation,
        average_afterwards,
        own_technique,
        finetune_llm,
        reinforcement_learning,
        diffusion_on_images,
        wandb_sweep,
    )
}


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, example: Any) -> None:
    SCRIPTS[name](example)


def test_each_script_is_run() -> None:
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert there == {*SCRIPTS, "add_to_existing_code"}


@pytest.mark.turns(2)
@pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_kept_in_it(path: Path, example: Any) -> None:
    """But for the figures, which another processor's arithmetic may change, and the pixels of pictures."""
    notebook = notebooks.read(path)
    kept, ran = notebooks.kept(notebook), notebooks.ran(notebook)
    assert any(one.text for one in kept)
    assert [re.sub(r"\d[\d.,]*", "#", one.text) for one in ran] == [re.sub(r"\d[\d.,]*", "#", one.text) for one in kept]
    for old, new in zip(kept, ran, strict=True):
        assert (old.picture is None) == (new.picture is None)
        if old.picture is not None and new.picture is not None:
            pictures = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in (old.picture, new.picture)]
            assert pictures[0].size == pictures[1].size
            assert all(len(picture.getcolors(2**24) or ()) > 8 for picture in pictures)
    assert path.stat().st_size < (300_000 if any(one.picture for one in kept) else 20_000)

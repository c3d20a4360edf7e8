"""AsyncCheckpoint: the same bytes, written while training goes on; errors and kills lose no checkpoint."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_efficient import AsyncCheckpoint, ConfigurationError, ExactResume, SafeCheckpointIO
from lit_efficient.cli.run_folder import LastCheckpoint
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import load_verified, newest_in
from lit_efficient.plugins import safe_checkpoint_io
from tests.callbacks.resume_kit import Tiny, equal, fit

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")


def saver(folder: Path, **arguments: Any) -> ModelCheckpoint:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **{"save_top_k": -1, **arguments})
    saving.last_model_path = str(folder / "last.ckpt")
    return saving


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fitted(callbacks: list[Callback], **arguments: Any) -> Any:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    return fit(Tiny(), callbacks, plugins=[SafeCheckpointIO()], enable_checkpointing=saves, **arguments)


def test_files_have_the_same_bytes_and_resume_bit_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    whole = fitted([ExactResume(), saver(folder, save_last=True)])
    expected = contents(folder)
    for path in folder.iterdir():
        path.unlink()
    run = fitted([ExactResume(), saver(folder, save_last=True), AsyncCheckpoint()])
    assert len(expected) == run.global_step + 1
    assert contents(folder) == expected
    assert (folder / "last.ckpt").samefile(folder / f"step={run.global_step}.ckpt")
    resumed = fitted([ExactResume(), saver(tmp_path / "again"), AsyncCheckpoint()], ckpt_path=folder / "step=5.ckpt")
    assert equal(resumed.lightning_module.state_dict(), whole.lightning_module.state_dict())


class Gate(Callback):
    """Hold back the first write until the weights have changed after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stepped = threading.Event()
        self.saves = 0
        self.ahead: list[int] = []
        save = safe_checkpoint_io.save_atomically

        def held_back(content: object, target: Path) -> None:
            assert self.stepped.wait(60), "training waited for the write"
            self.ahead.append(self.step)
            save(content, target)

        monkeypatch.setattr(safe_checkpoint_io, "save_atomically", held_back)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.step = trainer.global_step
        if trainer.global_step == 2:
            self.stepped.set()


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    fitted([saver(plain)], max_epochs=1)
    gate = Gate(monkeypatch)
    fitted([AsyncCheckpoint(), saver(tmp_path / "later"), gate], max_epochs=1)
    assert gate.ahead[0] >= 2  # the file of step 1
    for path in plain.iterdir():
        found = load_verified(tmp_path / "later" / path.name)
        assert equal(found["state_dict"], load_verified(path)["state_dict"])
        assert equal(found["optimizer_states"], load_verified(path)["optimizer_states"])


def test_an_error_reaches_the_user_and_the_previous_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = os.replace

    def replace(source: Path, target: Path) -> None:
        if "step=2" in str(target):
            raise OSError(28, "No space left on device", str(target))
        replaced(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step=2\.ckpt: No space left on device"):
        fitted([AsyncCheckpoint(), saver(tmp_path, save_top_k=1)], max_epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    monkeypatch.undo()
    run = fitted([AsyncCheckpoint()], max_epochs=1)
    run.save_checkpoint(tmp_path / "after.ckpt")  # outside of fit: synchronous
    assert torch.load(tmp_path / "after.ckpt", weights_only=True)["global_step"] == run.global_step


def save_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each save take so many seconds longer."""
    save = safe_checkpoint_io.save_atomically

    def slowly(content: object, target: Path) -> None:
        time.sleep(seconds)
        save(content, target)

    monkeypatch.setattr(safe_checkpoint_io, "save_atomically", slowly)


def test_the_last_step_of_a_command_has_its_name_when_the_fit_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_slowly(monkeypatch, 0.2)
    fitted([AsyncCheckpoint(), LastCheckpoint()], max_epochs=1, default_root_dir=tmp_path)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


class Looks(Callback):
    """Ask after each step for the newest checkpoint of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.newest.append(newest_in(self.folder).name)


def test_the_newest_checkpoint_is_the_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_slowly(monkeypatch, 0.05)
    looks = Looks(tmp_path)
    fitted([saver(tmp_path), AsyncCheckpoint(), looks], max_epochs=1, accumulate_grad_batches=1, limit_train_batches=3)
    assert looks.newest == [tmp_path.name, "step=1.ckpt", "step=2.ckpt"]  # savers save after all other callbacks


class Scores(Callback):
    """Log a metric for each step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.log("score", float([5, 3, 4, 1, 2, 6, 0, 7][trainer.global_step % 8]))


@pytest.mark.parametrize("kept", [3, -1])
def test_checkpoints_of_one_name_get_the_numbers_that_they_have_without_it(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a name is asked for while the file of that name is written or removed."""
    save_slowly(monkeypatch, 0.05)
    found = []
    for callbacks in ([], [AsyncCheckpoint()]):
        folder = tmp_path / f"{len(callbacks)}"
        saving = ModelCheckpoint(folder, "best", "score", every_n_train_steps=1, save_top_k=kept)
        run = fitted([Scores(), saving, *callbacks], max_epochs=2)
        steps = {file.name: load_verified(file)["global_step"] for file in folder.iterdir()}
        assert kept == 3 or len(steps) == run.global_step
        found.append((steps, Path(saving.best_model_path).name))
    assert found[0] == found[1]


class OwnWriter(SingleDeviceStrategy):
    """A strategy that writes checkpoints in its own way."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise AssertionError


def test_it_needs_a_plugin_and_a_strategy_that_can() -> None:
    with pytest.raises(ConfigurationError, match=r"TorchCheckpointIO cannot write in the background: add SafeCheck"):
        fit(Tiny(), [AsyncCheckpoint()])
    with pytest.raises(ConfigurationError, match="makes a link to a file that is not written yet: set save_last=True"):
        fitted([AsyncCheckpoint(), ModelCheckpoint(save_last="link")])
    with pytest.raises(ConfigurationError, match="OwnWriter writes its checkpoints itself"):
        fit(Tiny(), [AsyncCheckpoint()], plugins=[SafeCheckpointIO()], strategy=OwnWriter())

"""``--ckpt_path``: checked first, and the config wins over it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lit_efficient.__main__ import main
from lit_efficient.files import checkpoints
from tests.cli.toy_runs import ALLOW, STEPS, fit, refused
from tests.support_cli import Recorder, ToyData, ToyModel


@pytest.fixture
def trained(tmp_path):
    """A checkpoint after two epochs."""
    assert (
        fit("--trainer.enable_checkpointing", "true", "--trainer.default_root_dir", "first", "--optimizer", "SGD") == 0
    )
    ToyData.touched = 0
    return str(next(Path("first").rglob("last.ckpt")))


def test_the_config_wins_over_the_checkpoint_and_says_so(trained, caplog, capsys):
    with caplog.at_level("INFO"):
        assert (
            fit(
                "--trainer.enable_checkpointing",
                "true",
                "--ckpt_path",
                trained,
                "--model.scale",
                "3",
                "--data.batch_size",
                "4",
                "--trainer.max_epochs",
                "3",
            )
            == 0
        )
    assert ToyModel.last.scale == 3.0
    said = caplog.text + capsys.readouterr().err
    assert "model.scale: 1.0 in the checkpoint -> 3.0 in the config" in said
    assert "hidden" not in said
    assert Recorder.last.trainer.global_step == STEPS + 2  # 4 batches became 2


def test_a_checkpoint_of_another_architecture_is_refused_before_data(trained, capsys):
    said = refused(capsys, "--ckpt_path", trained, "--model.hidden", "7", "--trainer.max_epochs", "9")
    assert "net.0.weight: [4, 3] in the checkpoint, [7, 3] in the model" in said
    said = refused(capsys, "--ckpt_path", trained, "--model", "tests.support_cli.OtherModel", command="validate")
    assert "OtherModel" in said
    assert "net.0.weight" in said


def test_a_checkpoint_of_another_architecture_that_shows_late(trained, capsys):
    assert fit("--ckpt_path", trained, "--model.hidden", "7", "--model.late", "true", "--trainer.max_epochs", "3") == 2
    text = capsys.readouterr().err
    said = text[text.index("error: ") :]
    assert "net.0.weight: [4, 3] in the checkpoint, [7, 3] in the model" in said
    assert len(said.splitlines()) <= 10


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_one_flipped_bit_in_a_checkpoint_is_seen(trained, capsys):
    content = bytearray(Path(trained).read_bytes())
    weights = torch.load(trained, weights_only=True)["state_dict"]["net.0.weight"].numpy().tobytes()
    content[content.index(weights) + 5] ^= 1
    flipped = Path("alone/flipped.ckpt")
    flipped.parent.mkdir()
    flipped.write_bytes(content)
    said = refused(capsys, "--ckpt_path", str(flipped))
    assert "damaged" in said
    assert "No other *.ckpt" in said
    shutil.copy(trained, "alone/good.ckpt")
    for command in ("fit", "validate", "test", "predict"):  # what was named is not replaced
        said = refused(capsys, "--ckpt_path", str(flipped), command=command)
        assert "flipped.ckpt is damaged" in said
        assert "The last good checkpoint in its folder: alone/good.ckpt" in said


def test_a_checkpoint_is_compared_with_its_checksums_once_unless_it_changes_meanwhile(trained, capsys, monkeypatch):
    compared, compare = [], checkpoints._check_records
    monkeypatch.setattr(checkpoints, "_check_records", lambda file, name: compared.append(name) or compare(file, name))
    saves = "--trainer.enable_checkpointing=true"
    resume = [saves, "--optimizer=SGD", "--trainer.max_epochs=3", "--ckpt_path", trained]
    assert fit(*resume) == 0
    assert main(["validate", *ALLOW, "-c", "base.yaml", saves, "--ckpt_path", trained]) == 0
    assert [str(name) for name in compared] == [trained] * 2  # once a command

    weights = torch.load(trained, weights_only=True)["state_dict"]["net.0.weight"].numpy().tobytes()

    def setup(self, stage):
        content = bytearray(Path(trained).read_bytes())
        content[content.index(weights) + 5] ^= 1
        Path(trained).write_bytes(content)

    monkeypatch.setattr(ToyModel, "setup", setup)
    assert fit(*resume) == 2
    assert "last.ckpt is damaged" in capsys.readouterr().err


def test_words_for_checkpoints_need_a_training(capsys):
    assert "no file 'best'" in refused(capsys, "--ckpt_path", "best", command="validate")


def test_a_file_of_the_name_last_is_the_file(trained):
    shutil.copy(trained, "last")
    assert main(["validate", *ALLOW, "-c", "base.yaml", "--trainer.enable_checkpointing=true", "--ckpt_path=last"]) == 0
    kept = torch.load("last", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in ToyModel.last.state_dict().items())


def test_states_that_a_technique_has_shaped_are_refused_without_it(capsys):
    low = [{"class_path": "GaLore", "init_args": {"rank": 1, "targets": ["net.0"]}}]
    more = ["--optimizer", "AdamW", "--trainer.enable_checkpointing", "true"]
    low = ["--trainer.callbacks+", json.dumps(low)]
    assert fit(*more, *low) == 0
    path = next(Path("runs").rglob("last.ckpt"))
    assert fit(*more, *low, "--ckpt_path", str(path), "--trainer.max_epochs", "3") == 0
    ToyData.touched = 0
    said = refused(capsys, *more, "--ckpt_path", str(path), "--trainer.max_epochs", "9")
    assert "GaLore is missing: the checkpoint was written with it" in said
    assert "use the checkpoint's techniques" in said

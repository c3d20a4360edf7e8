"""The command line in-process: a run and what follows it. Every run is a real one, on a toy task."""

import shlex
from pathlib import Path

import pytest
import yaml

from lit_efficient.__main__ import main
from lit_efficient.cli.run import write_config
from tests.cli.toy_runs import STEPS, fit
from tests.support_cli import Recorder

BEST = "{class_path: ModelCheckpoint, init_args: {monitor: val/loss, filename: best, save_weights_only: true}}"


@pytest.mark.parametrize("best", [False, True])
def test_the_last_words_of_a_fit_can_be_typed(best, capsys):
    keep = ["--trainer.enable_checkpointing=true", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    assert fit(*keep, *([f"--trainer.callbacks+={BEST}"] if best else [])) == 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  python -m lit_efficient")]
    assert [command[3] for command in commands] == ["validate", "fit"]
    assert "tests" in commands[0]
    saved, run = Path(commands[0][commands[0].index("-c") + 1]), Path("runs/base/latest").resolve()
    assert saved.parent.resolve() == run
    assert Path("logs/lightning_logs/version_0/metrics.csv").parent.is_dir()  # of its own, as the config says
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    named = [Path(command[command.index("--ckpt_path") + 1]).name for command in commands]
    assert named == ["best.ckpt" if best else "last.ckpt", "last.ckpt"]
    assert ("best checkpoint" in printed) is best
    assert main(commands[0][3:]) == 0
    assert main(commands[1][3:]) == 0
    assert Recorder.last.trainer.global_step == 2 * STEPS  # went on where the first fit stopped
    assert len(Recorder.last.rates) == STEPS
    assert Path("runs/base/latest").resolve() == run
    kept, new = (yaml.safe_load((run / name).read_text()) for name in ("config_1.yaml", "config.yaml"))
    assert (kept["trainer"]["max_epochs"], new["trainer"]["max_epochs"]) == (2, 4)


def test_configs_are_numbered_and_never_lost(tmp_path):
    for text in ("a", "b", "b", "c"):
        write_config(tmp_path / "x" / "config.yaml", text)
    (tmp_path / "x" / "config.tmp").symlink_to(tmp_path / "elsewhere")  # what it would once have written through
    write_config(tmp_path / "x" / "config.yaml", "d")
    (tmp_path / "x" / "config.tmp").unlink()
    assert not (tmp_path / "elsewhere").exists()
    found = {path.name: path.read_text() for path in (tmp_path / "x").iterdir()}
    assert found == {"config_1.yaml": "a", "config_2.yaml": "b", "config_3.yaml": "c", "config.yaml": "d"}


def test_no_advertising_and_no_noise(capsys, caplog):
    assert fit() == 0
    captured = capsys.readouterr()
    assert "💡" not in captured.out + captured.err + caplog.text


def test_checkpoint_io_and_signals_are_part_of_every_fit():
    from lit_efficient import SafeCheckpointIO, SignalCheckpoint

    assert fit() == 0
    trainer = Recorder.last.trainer
    assert isinstance(trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert sum(isinstance(callback, SignalCheckpoint) for callback in trainer.callbacks) == 1


def test_a_checkpoint_io_of_the_users_stays():
    assert fit("--trainer.plugins+=tests.support_cli.OwnIO") == 0
    assert type(Recorder.last.trainer.strategy.checkpoint_io).__name__ == "OwnIO"

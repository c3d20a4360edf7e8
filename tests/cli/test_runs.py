"""The command line in-process: a run and what follows it. Every run is a real one, on a toy task."""

import json
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from lit_efficient import LanguageModeling, LatentDiffusion, RewardModeling
from lit_efficient.__main__ import SUBCOMMANDS, main
from lit_efficient.cli.defaults import write_config
from lit_efficient.cli.next_steps import COMMAND, next_steps
from lit_efficient.files.checkpoints import load_verified
from tests.cli.toy_runs import STEPS, fit
from tests.support import assert_equal
from tests.support_cli import Recorder

BEST = "{class_path: ModelCheckpoint, init_args: {monitor: val/loss, filename: best, save_weights_only: true}}"


@pytest.mark.parametrize("best", [False, True])
def test_the_last_words_of_a_fit_can_be_typed(best, capsys):
    keep = ["--trainer.enable_checkpointing=true", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    assert fit(*keep, *([f"--trainer.callbacks+={BEST}"] if best else [])) == 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  python -m lit_efficient")]
    assert [command[3] for command in commands] == ["validate", "export", "report"]
    assert all("runs/base/latest" in " ".join(command) for command in commands)
    assert "tests" in commands[0]
    saved, run = Path(commands[0][commands[0].index("-c") + 1]), Path("runs/base/latest").resolve()
    assert saved.parent.resolve() == run
    assert Path("logs/lightning_logs/version_0/metrics.csv").parent.is_dir()  # of its own, as the config says
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    validate, export, report = commands
    assert Path(validate[validate.index("--ckpt_path") + 1]).name == ("best.ckpt" if best else "last.ckpt")
    assert ("best checkpoint" in printed) is best
    assert main(validate[3:]) == 0
    assert main(export[3:]) == 0
    assert_equal(load_file(run / "export_8/model.safetensors"), load_verified(Path(export[4]))["state_dict"])
    assert main(report[3:]) == 0
    resume = ["fit", *validate[4:], "--ckpt_path", "runs/base/latest/last.ckpt", "--trainer.max_epochs", "4"]
    assert main(resume) == 0
    assert Recorder.last.trainer.global_step == 2 * STEPS  # went on where the first fit stopped
    assert len(Recorder.last.rates) == STEPS
    assert Path("runs/base/latest").resolve() == run
    kept, new = (yaml.safe_load((run / name).read_text()) for name in ("config_1.yaml", "config.yaml"))
    assert (kept["trainer"]["max_epochs"], new["trainer"]["max_epochs"]) == (2, 4)


def test_each_task_says_what_follows_from_it(tmp_path):
    """Their own commands are typed after a real training in the tests of the tasks' configs; here that they exist."""
    for task, verbs in ((LanguageModeling, ["generate"]), (LatentDiffusion, ["sample"]), (RewardModeling, [])):
        commands = [
            shlex.split(command.format(ckpt="a.ckpt", output="x", prompt="--prompt x"))
            for command in task.commands_after_fit
        ]
        assert [command[0] for command in commands] == verbs
        assert set(verbs) <= {*SUBCOMMANDS}


@pytest.mark.filterwarnings("ignore:html5lib")
def test_tensorboard_reads_what_the_last_line_names(capsys):
    from tensorboard.program import TensorBoard

    assert fit("--trainer.logger=true", "--trainer.log_every_n_steps=2") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  curves"))
    board = TensorBoard()
    board.configure([*shlex.split(line)[1:], "--inspect"])
    handler = signal.getsignal(signal.SIGTERM)  # it puts one of its own there
    try:
        assert board.main() == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert {"loss", "lr", "grad_norm", "data_wait"} <= set(capsys.readouterr().out.split())


def test_after_a_signal_the_whole_command_resumes(capsys):
    keep = ["--trainer.enable_checkpointing=true", "--trainer.callbacks+=ExactResume"]
    assert fit(*keep, "--trainer.callbacks+=tests.cli.test_run_folder.Terminated") == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    resume, report = [shlex.split(line)[3:] for line in printed.partition("Next:")[2].splitlines() if line]
    assert report == ["report", "runs/base/latest"]
    events = [json.loads(line) for line in Path("runs/base/latest/events.jsonl").read_text().splitlines()]
    assert events[-1]["reason"] == "signal 15"
    run = Path("runs/base/latest").resolve().name  # an event file names its own run for good
    assert [command.replace(run, "latest") for command in events[-1]["next"]] == [
        shlex.join(["python", "-m", "lit_efficient", *command]) for command in (resume, report)
    ]
    assert main(resume) == 0  # it meets no third step
    assert Recorder.last.trainer.global_step == STEPS


def test_what_would_read_a_checkpoint_of_deepspeeds_is_not_named_as_nothing_here_does(capsys):
    assert fit("--trainer.enable_checkpointing=true") == 0
    assert len(next_steps(Recorder.last.trainer, ["tests"], COMMAND)) == 3
    last = Path("runs/base/latest/last.ckpt")
    last.unlink()
    last.mkdir()
    (last / "latest").write_text("global_step8")
    for interrupted in ("", str(last)):
        (report,) = next_steps(Recorder.last.trainer, ["tests"], COMMAND, interrupted)
        assert report.startswith(f"{COMMAND} report ")


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


def test_the_summary_counts_parameters_and_no_flops(caplog):
    assert fit("--trainer.enable_model_summary=true") == 0
    said = "\n".join(record.getMessage() for record in caplog.records)
    lines = said.splitlines()
    module = Recorder.last.trainer.lightning_module
    total = sum(parameter.numel() for parameter in module.parameters())
    assert any(line.startswith(f"Parameters: {total}, of which {total} are trained") for line in lines)
    listed = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("  ") and len(line.split()) == 3}
    for name, part in module.named_children():
        assert listed[name] == str(sum(parameter.numel() for parameter in part.parameters()))
    assert "FLOPs" not in said
    assert "configured with model summary" not in said


def test_checkpoint_io_and_signals_are_part_of_every_fit():
    from lit_efficient import SafeCheckpointIO, SignalCheckpoint

    assert fit() == 0
    trainer = Recorder.last.trainer
    assert isinstance(trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert sum(isinstance(callback, SignalCheckpoint) for callback in trainer.callbacks) == 1


def test_a_checkpoint_io_of_the_users_stays():
    assert fit("--trainer.plugins+=tests.support_cli.OwnIO") == 0
    assert type(Recorder.last.trainer.strategy.checkpoint_io).__name__ == "OwnIO"

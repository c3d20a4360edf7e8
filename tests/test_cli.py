"""The command line in-process: every run is a real one, on a toy task."""

import copy
import math
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lit_efficient import PUBLIC
from lit_efficient.__main__ import main
from lit_efficient.cli import LitEfficientCLI, run
from lit_efficient.cli.parsing import expand_short_names, load_yaml, split_arguments
from lit_efficient.cli.preflight import check_config, check_devices, go_offline_without_key
from lit_efficient.cli.run import write_config
from lit_efficient.errors import ConfigurationError
from tests.support_cli import Recorder, ToyData, ToyModel

OVERLAYS = Path(__file__).parent.parent / "configs"
ALLOW = ["--allow-import", "tests"]
STEPS = 8  # 8 rows, 2 a batch, 2 epochs

BASE = {
    "model": {"class_path": "tests.support_cli.ToyModel"},
    "data": {"class_path": "tests.support_cli.ToyData"},
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "callbacks": [{"class_path": "tests.support_cli.Recorder", "init_args": {"tag": "base"}}],
    },
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    ToyData.touched = 0
    Recorder.last = ToyModel.last = None


def fit(*arguments: str) -> int:
    return main(["fit", *ALLOW, "-c", "base.yaml", *arguments])


def refused(capsys, *arguments: str, command: str = "fit", allow: tuple[str, ...] = tuple(ALLOW)) -> str:
    """Run what must be refused; return what it says."""
    capsys.readouterr()
    before = sorted(Path.cwd().rglob("*"))
    assert main([command, *allow, "-c", "base.yaml", *arguments]) == 2
    text = capsys.readouterr().err
    said = text[text.index("error: ") :]
    assert len(said.splitlines()) <= 10
    assert "Traceback" not in text
    assert "usage" not in text
    assert ToyData.touched == 0
    assert sorted(Path.cwd().rglob("*")) == before
    return said


# A run and what follows it -------------------------------------------------------------------------------------------


def test_the_last_word_of_a_fit_can_be_typed(capsys):
    keep = [
        "--trainer.enable_checkpointing",
        "true",
        "--trainer.logger",
        "CSVLogger",
        "--trainer.logger.save_dir",
        "logs",
    ]
    assert fit(*keep) == 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  python -m lit_efficient")]
    assert [command[3] for command in commands] == ["validate", "fit"]
    assert "tests" in commands[0]
    saved = Path(commands[0][commands[0].index("-c") + 1])
    assert saved.parent == Path("logs/lightning_logs/version_0")
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    assert main(commands[0][3:]) == 0
    with pytest.warns(UserWarning, match="dirpath has changed"):
        assert main(commands[1][3:]) == 0
    assert Recorder.last.trainer.global_step == 2 * STEPS  # went on where the first fit stopped
    assert len(Recorder.last.rates) == STEPS


def test_a_second_run_in_the_same_folder_keeps_the_first_config():
    keep = ["--trainer.enable_checkpointing", "true", "--trainer.default_root_dir", "here"]
    assert fit(*keep) == 0
    with pytest.warns(UserWarning, match="exists and is not empty"):
        assert fit(*keep, "--trainer.max_epochs", "1") == 0
    kept, new = (yaml.safe_load(Path("here", name).read_text()) for name in ("config_1.yaml", "config.yaml"))
    assert (kept["trainer"]["max_epochs"], new["trainer"]["max_epochs"]) == (2, 1)


def test_configs_are_numbered_and_never_lost(tmp_path):
    for text in ("a", "b", "b", "c"):
        write_config(tmp_path / "x" / "config.yaml", text)
    found = {path.name: path.read_text() for path in (tmp_path / "x").iterdir()}
    assert found == {"config_1.yaml": "a", "config_2.yaml": "b", "config.yaml": "c"}


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
    assert fit("--trainer.plugins+=lightning.pytorch.plugins.io.TorchCheckpointIO") == 0
    assert type(Recorder.last.trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


# Names and overlays --------------------------------------------------------------------------------------------------


def test_short_names_are_written_in_full_in_yaml():
    text = """
    model: LanguageModeling
    trainer:
      callbacks+:
        - StochasticDepth
        - class_path: SNRWeighting
          init_args: {rule: GPT}
      logger: CSVLogger
    """
    assert load_yaml(text) == {
        "model": "lit_efficient.LanguageModeling",
        "trainer": {
            "callbacks+": [
                "lit_efficient.StochasticDepth",
                {"class_path": "lit_efficient.SNRWeighting", "init_args": {"rule": "GPT"}},
            ],
            "logger": "CSVLogger",
        },
    }
    assert set(PUBLIC) == {expand_short_names(name, "class_path").removeprefix("lit_efficient.") for name in PUBLIC}


def test_short_names_are_written_in_full_on_the_command_line():
    argv = [
        "fit",
        "--model=GPT",
        "--trainer.callbacks+",
        "StochasticDepth",
        "--model.name",
        "GPT",
        "--data.help",
        "PythonCorpus",
    ]
    full, allowed = split_arguments([*argv[:2], "--allow-import", "a", *argv[2:], "--allow-import=b.c"])
    assert allowed == ["a", "b.c"]
    assert full == [
        "fit",
        "--model=lit_efficient.GPT",
        "--trainer.callbacks+",
        "lit_efficient.StochasticDepth",
        "--model.name",
        "GPT",
        "--data.help",
        "lit_efficient.PythonCorpus",
    ]


def test_a_class_of_the_users_with_our_name_does_not_clash():
    from lit_efficient import SignalCheckpoint as Ours
    from tests.support_cli import SignalCheckpoint as Theirs

    assert fit("--trainer.callbacks+=SignalCheckpoint", "--trainer.callbacks+=tests.support_cli.SignalCheckpoint") == 0
    kinds = [type(callback) for callback in Recorder.last.trainer.callbacks]
    assert kinds.count(Ours) == 1
    assert kinds.count(Theirs) == 1


def test_overlays_append(tmp_path):
    for tag in ("one", "two"):
        part = {"class_path": "tests.support_cli.Recorder", "init_args": {"tag": tag}}
        (tmp_path / f"{tag}.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [part]}}))
    assert (
        fit(
            "-c",
            "one.yaml",
            "-c",
            "two.yaml",
            "--trainer.callbacks+=LearningRateMonitor",
            "--trainer.logger",
            "CSVLogger",
            "--trainer.logger.save_dir",
            ".",
        )
        == 0
    )
    tags = [callback.tag for callback in Recorder.last.trainer.callbacks if isinstance(callback, Recorder)]
    assert tags == ["base", "one", "two"]
    assert "LearningRateMonitor" in [type(callback).__name__ for callback in Recorder.last.trainer.callbacks]


def test_shipped_overlays_name_what_exists_and_begin_with_a_comment():
    files = sorted([*OVERLAYS.glob("techniques/*.yaml"), *OVERLAYS.glob("loggers/*.yaml")])
    assert len(files) >= 6
    for file in files:
        assert file.read_text().startswith("# ")
        trainer = yaml.safe_load(file.read_text())["trainer"]
        parts = trainer.get("callbacks+") or [trainer["logger"]]
        for part in parts:
            assert part["class_path"] in PUBLIC or hasattr(
                __import__("lightning.pytorch.loggers").pytorch.loggers, part["class_path"]
            )


# Optimizers ----------------------------------------------------------------------------------------------------------


def test_the_optimizer_holds_what_trains_and_the_scheduler_knows_the_end():
    assert (
        fit(
            "--model.frozen",
            "true",
            "--optimizer",
            "AdamW",
            "--optimizer.lr",
            "0.5",
            "--lr_scheduler",
            "CosineAnnealingLR",
        )
        == 0
    )
    optimizer = Recorder.last.trainer.optimizers[0]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in ToyModel.last.net[1].parameters()]
    expected = [0.25 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert Recorder.last.rates == pytest.approx(expected)


def test_layers_made_in_configure_model_are_trained():
    assert (
        fit(
            "--model.late", "true", "--optimizer", "AdamW", "--lr_scheduler", "OneCycleLR", "--lr_scheduler.max_lr", "1"
        )
        == 0
    )
    held = [id(p) for group in Recorder.last.trainer.optimizers[0].param_groups for p in group["params"]]
    assert held == [id(p) for p in ToyModel.last.parameters()]
    assert Recorder.last.trainer.lr_scheduler_configs[0].scheduler.total_steps == STEPS


def test_a_length_that_is_given_stays():
    assert (
        fit(
            "--optimizer", "SGD", "--optimizer.lr", "1", "--lr_scheduler", "LinearLR", "--lr_scheduler.total_iters", "2"
        )
        == 0
    )
    assert Recorder.last.rates == pytest.approx([1 / 3, 2 / 3, *[1.0] * (STEPS - 2)])


def test_plateau_scheduler_by_its_short_name():
    assert fit("--optimizer", "SGD", "--lr_scheduler", "ReduceLROnPlateau", "--lr_scheduler.monitor", "val/loss") == 0
    config = Recorder.last.trainer.lr_scheduler_configs[0]
    assert (config.monitor, config.reduce_on_plateau, config.scheduler.last_epoch) == ("val/loss", True, 2)


def test_without_an_optimizer_key_the_module_decides():
    assert fit() == 0
    assert Recorder.last.rates == [0.25] * STEPS


def test_a_copy_of_the_module_optimizes_its_own_parameters():
    assert fit("--optimizer", "SGD", "--optimizer.lr", "0.1") == 0
    twin = copy.deepcopy(ToyModel.last)
    held = [id(p) for group in twin.configure_optimizers().param_groups for p in group["params"]]
    assert held == [id(p) for p in twin.parameters()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "AdamW", "--optimizer.lr", "-1"], ["optimizer", "AdamW", "-1"]),
        (["--lr_scheduler", "CosineAnnealingLR"], ["lr_scheduler", "optimizer"]),
        (
            [
                "--optimizer",
                "SGD",
                "--lr_scheduler",
                "OneCycleLR",
                "--lr_scheduler.max_lr",
                "1",
                "--lr_scheduler.pct_start",
                "3",
            ],
            ["OneCycleLR", "pct_start"],
        ),
        (["--optimizer", "SGD", "--lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"], ["monitor"]),
    ],
)
def test_wrong_optimizers_fail_before_data(arguments, words, capsys):
    said = refused(capsys, *arguments)
    assert all(word in said for word in words)


# Errors --------------------------------------------------------------------------------------------------------------

WRONG = {
    "unknown option": (["--trainer.max_epoch", "3"], ["trainer.max_epoch", "did you mean 'trainer.max_epochs'"]),
    "unknown argument of a class": (
        ["--model.hiden", "3"],
        ["ToyModel", "hiden", "did you mean 'hidden'", "accepted: "],
    ),
    "unknown argument of an optimizer": (["--optimizer", "SGD", "--optimizer.lrr", "1"], ["SGD", "did you mean 'lr'"]),
    "wrong type": (["--trainer.max_epochs", "many"], ["trainer.max_epochs", "many", "int, null"]),
    "wrong type in a class": (["--model.hidden", "wide"], ["ToyModel.hidden", "wide", "int"]),
    "wrong type in an optimizer": (["--optimizer", "SGD", "--optimizer.lr", "fast"], ["SGD.lr", "fast", "float"]),
    "null on the command line": (["--model.hidden", "null"], ["ToyModel.hidden", "null", "int"]),
    "choice": (["--trainer.precision", "bf16-mixd"], ["trainer.precision", "did you mean 'bf16-mixed'"]),
    "value out of range": (["--model.hidden", "0"], ["hidden must be at least 1, got 0", "support_cli.py"]),
    "unknown class": (
        ["--trainer.callbacks+=StochasticDepht"],
        ["trainer.callbacks", "did you mean 'StochasticDepth'"],
    ),
    "unknown optimizer": (["--optimizer", "AdamX"], ["optimizer", "'AdamX'", "did you mean 'Adam"]),
    "class of another kind": (
        ["--data", "tests.support_cli.ToyModel"],
        ["data", "ToyModel", "is not a LightningDataModule"],
    ),
    "no such class": (
        ["--model", "tests.support_cli.ToyModl"],
        ["'ToyModl'", "tests.support_cli", "did you mean 'ToyModel'"],
    ),
    "no such file": (["-c", "nothing.yaml"], ["config", "nothing.yaml", "no file"]),
    "too many devices": (["--trainer.devices", "4096"], ["trainer.devices", "4096", str(os.cpu_count())]),
    "folder below a file": (["--trainer.default_root_dir", "base.yaml/x"], ["trainer.default_root_dir", "base.yaml"]),
    "secret": (
        ["--trainer.callbacks+=tests.support_cli.Recorder", "--trainer.callbacks.api_key=12345"],
        ["api_key", "environment"],
    ),
    "no checkpoint": (["--ckpt_path", "none.ckpt"], ["ckpt_path", "none.ckpt"]),
    "folder as checkpoint": (["--ckpt_path", "."], ["ckpt_path", "folder"]),
    "config as checkpoint": (["--ckpt_path", "base.yaml"], ["ckpt_path", "base.yaml", "damaged"]),
    "empty allow-import": (["--allow-import"], ["--allow-import needs"]),
    "allow everything": (["--allow-import", "*"], ["--allow-import", "'*'"]),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_an_error_is_a_sentence(arguments, words, capsys):
    said = refused(capsys, *arguments)
    assert [word for word in words if word not in said] == [], said


WRONG_YAML = {
    "duplicate key": ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", ["bad.yaml", "'max_epochs'", "line 2", "line 3"]),
    "no yaml": ("trainer:\n  max_epochs: [1\n", ["bad.yaml", "line 2"]),
    "a list": ("- 1\n", ["bad.yaml", "mapping"]),
    "empty": ("", ["bad.yaml", "mapping"]),
    "unknown key": ("trainer:\n  max_epoch: 1\n", ["did you mean 'trainer.max_epochs'", "bad.yaml, line 2"]),
    "unknown top key": ("modle: ToyModel\n", ["did you mean 'model'", "bad.yaml, line 1"]),
    "unknown empty key": ("modle: {}\n", ["did you mean 'model'", "bad.yaml, line 1"]),
    "unknown empty branch": ("optimzer:\n  foo: {}\n", ["optimzer", "accepted: "]),
    "nothing below a key": ("seed_everything: 1\ntrainer:\n", ["trainer"]),
    "null": ("model:\n  init_args:\n    hidden: null\n", ["ToyModel.hidden", "null", "bad.yaml, line 3"]),
    "in a list": (
        "trainer:\n  callbacks:\n  - class_path: ModelCheckpoint\n    init_args:\n      monitr: x\n",
        ["ModelCheckpoint", "did you mean 'monitor'", "bad.yaml, line 5"],
    ),
    "null in the trainer": ("trainer:\n  deterministic: 3.5\n", ["trainer.deterministic", "3.5", "bad.yaml, line 2"]),
}


@pytest.mark.parametrize(("text", "words"), WRONG_YAML.values(), ids=WRONG_YAML)
def test_an_error_in_a_file_names_the_file_and_the_line(text, words, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    said = refused(capsys, "-c", "bad.yaml")
    assert [word for word in words if word not in said] == [], said


def test_debug_and_bugs_show_the_traceback(monkeypatch):
    with pytest.raises(ConfigurationError):
        fit("--trainer.devices", "4096", "--debug")
    monkeypatch.setenv("LIT_EFFICIENT_DEBUG", "1")
    with pytest.raises(ConfigurationError):
        fit("--trainer.devices", "4096")
    monkeypatch.delenv("LIT_EFFICIENT_DEBUG")
    monkeypatch.setattr(ToyModel, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit()


def test_devices_are_counted(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for devices in ("auto", 1, 2, "2", "0,1", -1, [0, 1]):
        check_devices("cpu", devices)
    for devices in (3, "3", "0,2", [2]):
        with pytest.raises(ConfigurationError, match=r"trainer\.devices"):
            check_devices("cpu", devices)


def test_words_that_merely_resemble_secrets_are_no_secrets():
    check_config({"model": {"pad_token": "<pad>", "tokenizer": "bpe", "token_dropout": "x", "password": None}})
    for key in ("api_key", "wandb_api_key", "password", "hf_token", "aws_secret"):
        with pytest.raises(ConfigurationError, match=key):
            check_config({"trainer": {"logger": [{"init_args": {key: "x"}}]}})


# Imports -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "os.system"],
        ["--model=subprocess.Popen"],
        ["--model", "builtins.eval"],
        ["--trainer.logger", "os.system"],
        ["--trainer.callbacks+=lightning.pytorch.cli.os.system"],
        ["--trainer.callbacks+=tests.support_cli.Recorder", "--trainer.callbacks.hook=os.system"],
        ["--trainer.callbacks+={class_path: tests.support_cli.Recorder, init_args: {hook: subprocess.Popen}}"],
        ["--optimizer", "torch.hub.load"],
        ["--optimizer", "torch.nn.modules.module.torch.load"],
        ["--model", "os.system", "--print_config"],
    ],
)
def test_a_config_cannot_name_any_code(arguments, capsys):
    assert "is refused" in refused(capsys, *arguments)


def test_what_is_refused_is_not_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "sneaky_module.py").write_text("import pathlib\npathlib.Path('was_here').touch()\nclass M: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for place in (
        ["--model", "sneaky_module.M"],
        ["--trainer.callbacks+=sneaky_module.M"],
        ["--model.help", "sneaky_module.M"],
    ):
        for more in ([], ["--print_config"]):
            assert main(["fit", *ALLOW, "-c", "base.yaml", *place, *more]) == 2
            assert "--allow-import sneaky_module" in capsys.readouterr().err
    assert "sneaky_module" not in sys.modules
    assert not Path("was_here").exists()


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_module.py").write_text("x = 1\ndef (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for place in ("--model", "--trainer.callbacks+"):
        said = refused(capsys, "--allow-import", "broken_module", place, "broken_module.M")
        assert "broken_module.py, line 2" in said


def test_permission_lasts_for_one_run(capsys):
    assert main(["fit", "-c", "base.yaml", "--allow-import=tests", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"] == "tests.support_cli.ToyModel"
    assert "--allow-import tests" in refused(capsys, "--print_config", allow=())


def test_a_script_of_the_users_allows_its_own_classes():
    cli = LitEfficientCLI(args=["fit", "-c", "base.yaml"], allow_imports=["tests"])
    assert cli.trainer.global_step == STEPS


class WithExtras(LitEfficientCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--rows", type=int, default=8)
        parser.add_argument("--loud", action="store_true")
        parser.link_arguments("rows", "data.init_args.rows")


def test_a_script_may_add_and_link_arguments(tmp_path):
    (tmp_path / "more.yaml").write_text("rows: 4\nloud: true\nmodel.init_args.scale: 2\ntrainer.max_epochs: 1\n")
    cli = WithExtras(args=["fit", *ALLOW, "-c", "base.yaml", "-c", "more.yaml"])
    assert (cli.trainer.global_step, cli.model.scale, cli.config.fit.loud) == (2, 2.0, True)


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A checkpoint after two epochs."""
    assert (
        fit("--trainer.enable_checkpointing", "true", "--trainer.default_root_dir", "first", "--optimizer", "SGD") == 0
    )
    ToyData.touched = 0
    return str(next(Path("first").rglob("*.ckpt")))


def test_the_config_wins_over_the_checkpoint_and_says_so(trained, caplog, capsys):
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="dirpath has changed"):
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
    said = refused(capsys, "--ckpt_path", trained, "--model.hidden", "7")
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
    with pytest.warns(UserWarning, match=r"flipped.ckpt is damaged.*Going on from the last good .*good.ckpt"):
        assert fit("--ckpt_path", str(flipped), "--trainer.max_epochs", "3") == 0
    assert Recorder.last.trainer.global_step > torch.load(trained, weights_only=True)["global_step"]


def test_words_for_checkpoints_need_a_training(capsys):
    assert "no file 'best'" in refused(capsys, "--ckpt_path", "best", command="validate")


# W&B -----------------------------------------------------------------------------------------------------------------


def test_a_wandb_run_without_a_key_is_recorded_offline(monkeypatch, capsys):
    import wandb

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("NETRC", str(Path.cwd() / "netrc"))
    try:
        code = fit("-c", str(OVERLAYS / "loggers/wandb.yaml"), "--trainer.enable_checkpointing", "true")
        assert code == 0
        experiment = Recorder.last.trainer.logger.experiment
        assert experiment.offline
        assert experiment.config["trainer"]["max_epochs"] == 2
        assert experiment.config["model"]["class_path"] == "tests.support_cli.ToyModel"
    finally:
        wandb.finish()
        monkeypatch.delenv("WANDB_MODE", raising=False)
    printed = capsys.readouterr().out
    sync = next(line.split()[-1] for line in printed.splitlines() if line.startswith("  wandb sync "))
    record = next(Path(sync).glob("run-*.wandb"))
    for _ in range(300):  # the service of W&B writes after `finish` has returned, on a busy machine seconds later
        if record.stat().st_size > 1000:
            break
        time.sleep(0.1)
    assert record.stat().st_size > 1000
    assert Path(sync).parts[:2] == ("runs", "wandb")
    assert len(list(Path("runs/lit_efficient").glob("*/config.yaml"))) == 1  # beside the checkpoints


@pytest.mark.parametrize(
    ("environment", "offline"),
    [
        ({}, True),
        ({"WANDB_API_KEY": "x"}, False),
        ({"WANDB_MODE": "online"}, False),
        ({"WANDB_MODE": "offline"}, False),
    ],
)
def test_wandb_goes_offline_only_without_a_word_and_a_key(environment, offline, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    config = {"trainer": {"logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}}}
    assert go_offline_without_key(config, environment) is offline
    assert (environment.get("WANDB_MODE") == "offline") is (offline or environment.get("WANDB_MODE") == "offline")
    assert go_offline_without_key({"trainer": {"logger": None}}, {}) is False


def test_a_key_in_netrc_is_found(tmp_path):
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password k\n")
    config = {"trainer": {"logger": [{"class_path": "WandbLogger"}]}}
    assert go_offline_without_key(config, {"NETRC": str(tmp_path / "keys")}) is False


def test_help_of_a_subcommand_names_the_parts(capsys):
    assert run(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--trainer.max_epochs", "--optimizer", "--ckpt_path", "--model"))

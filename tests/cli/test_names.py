"""Short names in YAML and on the command line, and overlays that append."""

from pathlib import Path

import yaml
from lightning.pytorch import callbacks, loggers
from torch.optim import lr_scheduler

from lit_efficient import PUBLIC
from lit_efficient.__main__ import SUBCOMMANDS
from lit_efficient.cli import run
from lit_efficient.cli.config_text import expand_short_names, load_yaml
from lit_efficient.cli.parsing import split_arguments
from lit_efficient.internals.jsonargparse_parser import subcommands
from tests.cli.toy_runs import OVERLAYS, fit
from tests.support_cli import Parts, Recorder, ToyModel


def test_short_names_are_written_in_full_in_yaml():
    text = """
    model: LanguageModeling
    trainer:
      callbacks+:
        - StochasticDepth
        - class_path: SNRWeighting
          init_args: {rule: GPT}
      logger: CSVLogger
      strategy: ModelParallelStrategy
    """
    assert load_yaml(text) == {
        "model": "lit_efficient.LanguageModeling",
        "trainer": {
            "callbacks+": [
                "lit_efficient.StochasticDepth",
                {"class_path": "lit_efficient.SNRWeighting", "init_args": {"rule": "GPT"}},
            ],
            "logger": "CSVLogger",
            "strategy": {"class_path": "ModelParallelStrategy"},
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
        "--trainer.strategy",
        "FSDPStrategy",
        "--trainer.strategy=ddp",
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
        '--trainer.strategy={"class_path": "FSDPStrategy"}',
        "--trainer.strategy=ddp",
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
        written = yaml.safe_load(file.read_text())
        trainer = written.get("trainer", {})
        appended = trainer.get("callbacks+") or trainer.get("plugins+")
        slots = [trainer.get("logger"), trainer.get("strategy"), written.get("lr_scheduler"), written.get("optimizer")]
        parts = appended or [part for part in slots if part]
        assert parts
        for part in parts:
            assert part["class_path"] in {*PUBLIC, *loggers.__all__, *callbacks.__all__, *vars(lr_scheduler)}


def test_help_of_a_subcommand_names_the_parts(capsys):
    assert run(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--trainer.max_epochs", "--optimizer", "--ckpt_path", "--model"))


def test_options_are_added_for_the_subcommand_that_comes_first_and_else_for_all():
    config = yaml.safe_load(Path("base.yaml").read_text())
    Path("all.yaml").write_text(yaml.safe_dump({"fit": config, "validate": config}))
    for words, wanted in ((["fit", "-c", "base.yaml"], {"fit"}), (["-c", "all.yaml", "validate"], {*SUBCOMMANDS[:4]})):
        parts = Parts(args=words, allow_imports=["tests"])
        assert subcommands(parts.parser).keys() == wanted
        assert type(parts.model) is ToyModel

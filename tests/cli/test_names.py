"""Short names in YAML and on the command line, and overlays that append."""

import enum
import inspect
import os
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import callbacks, loggers
from torch.optim import lr_scheduler

from lit_efficient import PUBLIC
from lit_efficient.__main__ import SUBCOMMANDS, main
from lit_efficient.cli import names, run
from lit_efficient.cli.arguments import read_command
from lit_efficient.cli.signatures import full_name, short_names, signature
from lit_efficient.cli.tree import load, plain_data
from lit_efficient.internals.jsonargparse_parser import subcommands
from tests.cli.toy_runs import OVERLAYS, fit, refused
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
    assert load(text) == {
        "model": {"class_path": "lit_efficient.LanguageModeling"},
        "trainer": {
            "callbacks+": [
                {"class_path": "lit_efficient.StochasticDepth"},
                {"class_path": "lit_efficient.SNRWeighting", "init_args": {"rule": "GPT"}},
            ],
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger"},
            "strategy": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"},
        },
    }
    assert set(PUBLIC) == {full_name(name).removeprefix("lit_efficient.") for name in PUBLIC}


def test_short_names_are_written_in_full_on_the_command_line():
    words = [
        "fit",
        "--model=GPTConfig",
        "--allow-import",
        "a",
        "--trainer.callbacks+",
        "StochasticDepth",
        "--model.name",
        "GPTConfig",
        "--data.help",
        "PythonCorpus",
        "--trainer.strategy",
        "FSDPStrategy",
        "--trainer.logger=false",
        "--my-own=3",
        "--allow-import=b.c",
    ]
    command = read_command(words)
    assert command.packages == ["a", "b.c"]
    assert command.rest == ["--data.help=PythonCorpus", "--my-own=3"]
    assert plain_data(command.tree) == {
        "model": {"class_path": "lit_efficient.GPTConfig", "init_args": {"name": "GPTConfig"}},
        "trainer": {
            "callbacks+": [{"class_path": "lit_efficient.StochasticDepth"}],
            "strategy": {"class_path": "lightning.pytorch.strategies.FSDPStrategy"},
            "logger": False,
        },
    }


def test_signatures_from_sources_are_those_of_the_classes():
    """A key that a class takes is never refused, and what the sources name is what the constructor takes."""
    known = {**{name: f"lit_efficient.{name}" for name in PUBLIC}, **short_names()}
    checked = 0
    for name, path in known.items():
        kind = getattr(import_module(path.rpartition(".")[0]), name)
        found = signature(path) if isinstance(kind, type) else None
        if found is None or found.is_open or issubclass(kind, enum.Enum | Exception):
            continue
        parameters = inspect.signature(kind).parameters
        if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters.values()):
            continue
        accepted = [name for name in parameters if name not in ("params", "optimizer")]
        assert list(found.arguments) == accepted, name
        checked += 1
    assert checked > 150


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


def test_optimizers_of_other_packages_are_named_without_their_package():
    pytest.importorskip("prodigyopt")
    assert fit("--optimizer", "Prodigy", "--optimizer.d_coef", "2.0") == 0
    (optimizer,) = ToyModel.last.trainer.optimizers
    assert type(optimizer).__module__ == "prodigyopt.prodigy"
    assert optimizer.param_groups[0]["d_coef"] == 2.0
    assert optimizer.param_groups[0]["k"] > 0


def test_a_missing_package_of_an_optimizer_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(names, "missing_module", lambda path: path.partition(".")[0] if "CAME" in path else None)
    said = refused(capsys, "--optimizer", "CAME", "--optimizer.lr", "1e-3")
    assert "optimizer: CAME: there is no module 'came_pytorch': pip install " in said


@pytest.mark.parametrize(
    ("rate", "words"),
    [([], "CAME has no default learning rate: set optimizer.lr"), (["--optimizer.lr", "0"], "CAME: refuses its arg")],
)
def test_what_an_optimizer_of_another_package_asserts_is_said_in_words(rate, words, capsys):
    pytest.importorskip("came_pytorch")
    assert words in refused(capsys, "--optimizer", "CAME", *rate)


def test_a_run_without_a_model_names_the_configs_to_begin_with(capsys):
    for words in (["fit"], ["fit", "-c", "ema"], ["validate", "--ckpt_path", "x.ckpt"]):
        assert main(words) == 2
        printed = capsys.readouterr().err
        for name in ("language_model", "latent_diffusion", "autoencoder"):
            assert f"python -m lit_efficient {words[0]} -c {name}" in printed


def test_commands_that_need_a_checkpoint_list_the_newest_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate"]) == 2
    assert "No run was found" in capsys.readouterr().err
    for age, name in enumerate(("new", "middle", "old", "oldest")):
        checkpoint = tmp_path / "runs" / "task" / name / "last.ckpt"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        os.utime(checkpoint, (1_000_000 - age, 1_000_000 - age))
    assert main(["generate", "--prompt", "x"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "--ckpt runs" in line]
    assert lines == [
        f"  python -m lit_efficient generate --ckpt runs/task/{name} ..." for name in ("new", "middle", "old")
    ]


def test_names_of_configs_are_suggested_from_the_nearest_on(capsys):
    assert main(["fit", "-c", "qlor"]) == 2
    assert "did you mean 'llm/qlora' or 'qlora' or " in capsys.readouterr().err

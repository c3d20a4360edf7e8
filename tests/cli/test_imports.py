"""A config imports what is allowed and nothing else; scripts may extend the command line."""

import sys
from inspect import isabstract
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.plugins import io

from lit_efficient.__main__ import main
from lit_efficient.cli import LitEfficientCLI
from tests.cli.toy_runs import ALLOW, STEPS, refused


@pytest.mark.turns(2)
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


def stock() -> list[str]:
    parts = {name: part for name, part in vars(io).items() if isinstance(part, type)}
    return [name for name, part in parts.items() if issubclass(part, io.CheckpointIO) and not isabstract(part)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", stock())
@pytest.mark.parametrize("place", ["plugins", "strategy", "inside"])
def test_a_config_alone_has_no_file_unpickled(name, place, capsys):
    """Lightning's own readers take pickles, as their arguments say."""
    part = {"class_path": f"lightning.pytorch.plugins.io.{name}"}
    if place == "inside":
        part = {"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO", "init_args": {"checkpoint_io": part}}
    if place == "strategy":
        strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"checkpoint_io": part}}
        trainer = {"strategy": strategy}
    else:
        trainer = {"plugins": [part]}
    Path("more.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    said = refused(capsys, "-c", "more.yaml")
    assert "must be SafeCheckpointIO or a class of your own" in said


def test_a_config_cannot_ask_for_pickles(capsys):
    Path("more.yaml").write_text("weights_only: false\n")
    for command in ("fit", "validate", "test", "predict"):
        for words in ([], ["--ckpt_path", "last"]):
            said = refused(capsys, "-c", "more.yaml", *words, command=command)
            assert "weights_only must be true or null" in said or "there is no file" in said


class WithExtras(LitEfficientCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--rows", type=int, default=8)
        parser.add_argument("--loud", action="store_true")
        parser.link_arguments("rows", "data.init_args.rows")


def test_a_script_may_add_and_link_arguments(tmp_path):
    (tmp_path / "more.yaml").write_text("rows: 4\nloud: true\nmodel.init_args.scale: 2\ntrainer.max_epochs: 1\n")
    cli = WithExtras(args=["fit", *ALLOW, "-c", "base.yaml", "-c", "more.yaml"])
    assert (cli.trainer.global_step, cli.model.scale, cli.config.fit.loud) == (2, 2.0, True)

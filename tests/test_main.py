"""The entry point: what answers without torch, and what it says to a wrong command."""

import os
import subprocess
import sys

import pytest

from lit_efficient import __version__
from lit_efficient.__main__ import HELP, SUBCOMMANDS, main
from tests.processes import ROOT, python


def test_what_only_lists_does_not_import_torch(tmp_path):
    code = """if True:
        import sys
        from lit_efficient.__main__ import main
        for argv in ([], ["--help"], ["--version"], ["techniques"], ["techniques", "--matrix"],
                     ["techniques", "--markdown"], ["techniques", "--help"], ["techniques", "nothing"], ["fitt"],
                     ["techniques", "--json"], ["techniques", "--csv"], ["techniques", "LoRA"],
                     ["techniques", "--for", "oom"], ["fit", "--help"], ["help", "test"], ["fit", "--EMA.help"],
                     ["completion", "bash"], ["completion", "fish"],
                     ["configs"], ["configs", "--json"], ["copy", "lora", "--force"]):
            main(argv)
        heavy = {"torch", "lightning", "lightning_utilities", "numpy", "yaml", "jsonargparse"}
        print("imported:", sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_a_misspelt_name_is_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "wrong.yaml").write_text("model: {init_args: {learning_rat: 1.0}}\n")
    (tmp_path / "inner.yaml").write_text("model: {init_args: {model: {dimm: 1}}}\n")
    code = """if True:
        import sys
        from lit_efficient.__main__ import main
        fit = ["fit", "-c", "language_model"]
        for words in (["-c", "langage_model"], ["--trainer.max_step=3"], ["--traner.max_steps=3"], ["--optimizer=AdmW"],
                      ["--trainer.callbacks+=EAM"], ["--trainer.callbacks+=EMA", "--trainer.callbacks.decya=0.9"],
                      ["-c", "wrong.yaml"], ["-c", "inner.yaml"], ["--data.batchsize=3"], ["--without", "ExactResum"],
                      ["--trainer.callbacks+=lit_efficient.EAM"], ["--optimizer=AdamW", "--optimizer.lrr=1"],
                      ["--trainer.profiler=SimpelProfiler"], ["--confg", "wrong.yaml"]):
            assert main([*fit, *words]) == 2
            assert main(["check", *fit[1:], *words]) == 2
        print("imported:", sorted({"torch", "lightning"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
    assert done.stderr.count("did you mean") == 28
    assert "in wrong.yaml, line 1" in done.stderr


def test_it_runs_through_runpy_too(tmp_path):
    code = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('lit_efficient', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"lit_efficient {__version__}\n"), done.stderr


def test_a_program_that_runs_it_keeps_its_search_path(tmp_path):
    code = (
        "import runpy, sys; sys.path[0] = '/of/the/program'; sys.argv[1:] = ['--version']\n"
        "try: runpy.run_module('lit_efficient', run_name='__main__')\n"
        "except SystemExit: print(sys.path[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines()[1:] == ["/of/the/program"], done.stderr


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help_says_what_it_is_and_gives_two_commands(argv, capsys):
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in SUBCOMMANDS)
    assert text.count("python -m lit_efficient fit -c language_model") == 2


@pytest.mark.parametrize("columns", ["", "60", "100"])
def test_help_fits_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns or 80)
    assert shown.split() == HELP.split()


def test_help_of_a_command_is_its_own(capsys):
    assert main(["help", "copy"]) == 0
    shown = capsys.readouterr().out
    assert main(["copy", "--help"]) == 0
    assert capsys.readouterr().out == shown
    assert "--force" in shown
    assert main(["help", "cpoy"]) == 2
    assert "Did you mean copy?" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_efficient {__version__}\n"


def test_unknown_command_names_the_nearest(capsys):
    assert main(["validat", "-c", "x.yaml"]) == 2
    assert "Did you mean validate?" in capsys.readouterr().err


def test_a_wrong_config_is_one_sentence_and_exit_code_2(tmp_path):
    done = python("-m", "lit_efficient", "fit", "-c", "missing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: config: there is no file")
    assert len(done.stderr.splitlines()) <= 2


def test_a_reader_that_has_read_enough_is_no_error():
    command = f"{sys.executable} -m lit_efficient --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_commands_without_a_trainer_answer_in_sentences(tmp_path, capsys):
    assert main(["average", str(tmp_path / "none.ckpt"), "--output", str(tmp_path / "mean.ckpt")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "none.ckpt" in said
    assert "Traceback" not in said
    assert main(["averge"]) == 2
    assert "Did you mean average?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["configs"],
        pytest.param(["fit", "-c", "missing.yaml"], marks=pytest.mark.turns(4, family="whole programs")),
    ],
)
def test_modules_in_the_working_directory_are_not_imported(words, tmp_path):
    for name in ("torch", "typing", "yaml", "json", "re", "lightning", "argparse", "lit_efficient_mine"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else runs')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lit_efficient", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert "somebody else" not in done.stdout + done.stderr
    assert done.returncode == (2 if "fit" in words else 0), done.stderr


def test_allow_import_looks_into_the_working_directory_last(tmp_path):
    (tmp_path / "typing.py").write_text("raise SystemExit('somebody else runs')\n")
    (tmp_path / "mine.py").write_text("from lightning.pytorch.demos.boring_classes import BoringModel as Mine\n")
    for words, allowed in ((["--allow-import", "mine"], True), ([], False)):
        done = python("-m", "lit_efficient", "fit", *words, "--model", "mine.Mine", "--print_config", cwd=tmp_path)
        assert (done.returncode == 0) is allowed, done.stderr

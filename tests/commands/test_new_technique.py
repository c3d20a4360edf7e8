"""Tests of ``new-technique``: the files pass their tests and linters as written, here and in a package of one's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_efficient.__main__ import main
from tests.processes import ROOT

LINTERS = (["check", "--select", "E,F,W,I,UP,B,C4,SIM,RUF,PT"], ["format", "--check"])


def succeeds(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=environment, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.turns(6, family="slow")
def test_files_of_a_package_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-technique", "L2Clamp"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"l2_clamp.py", "test_l2_clamp.py"}
    assert "pytest test_l2_clamp.py" in capsys.readouterr().out
    for words in LINTERS:
        succeeds("ruff", *words, "--line-length", "120", ".")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("lit_efficient.testing.CHECKS", ())  # a nightly test runs them
    assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_l2_clamp.py"]) == 0
    assert main(["new-technique", "L2Clamp"]) == 2
    assert "l2_clamp.py exists already" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_package_of_ones_own_keeps_the_contract(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new-technique", "Clamp"]) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_clamp.py"]
    assert "4 passed" in subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.nightly
def test_files_of_a_checkout(tmp_path, monkeypatch, capsys):
    """The commands that are printed pass in a copy of the repository."""
    for folder in ("lit_efficient", "tests", "configs", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    monkeypatch.chdir(tmp_path)
    assert main(["new-technique", "GradientLimit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    made = [line.removeprefix("Wrote ") for line in lines if line.startswith("Wrote ")]
    assert made == [
        "lit_efficient/callbacks/gradient_limit.py",
        "tests/callbacks/test_gradient_limit.py",
        "configs/techniques/gradient_limit.yaml",
    ]
    for words in LINTERS:
        succeeds("ruff", *words, made[0], made[1])
    commands = [line.split() for line in lines if line.startswith("  ")]
    assert [command[0] for command in commands] == ["python", "pytest", "pytest"]
    for command in commands:
        said = succeeds(*command[2 if command[0] == "python" else 0 :])
        assert command[0] == "python" or " passed" in said


@pytest.mark.parametrize("name", ["clamp", "My-Clamp", "EMA", "a.B"])
def test_a_name_that_cannot_be_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-technique", name]) == 2
    assert "new-technique: NAME must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

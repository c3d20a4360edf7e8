"""Code of users is clean under the strictest modes of mypy and pyright: tasks, techniques and what they call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

PROJECT = ROOT / "tests" / "typed_project"
WRONG = "EMA(decay='high')\napply(Regression(), [3])\nplan(loader())\n"


def found(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path):
    """The project with a second file, whose mistakes a checker must find if it reads the types of this package."""
    text = (PROJECT / "project.py").read_text("utf-8")
    (tmp_path / "project.py").write_text(text)
    (tmp_path / "wrong.py").write_text(f"from lit_efficient import EMA, apply, plan\nfrom project import *\n\n{WRONG}")
    return tmp_path


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # mypy reads torch and Lightning
def test_mypy_strict(project, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    said = found(project, "mypy", "--strict", "--config-file=", ".")
    assert "project.py" not in said, said
    assert said.count("wrong.py:") >= 3, said


@pytest.mark.nightly
def test_pyright_strict(project):
    pytest.importorskip("basedpyright")
    settings = {"include": ["."], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    said = found(project, "basedpyright", "--pythonpath", sys.executable)
    assert "project.py:" not in said, said
    assert said.count("wrong.py:") >= 3, said

"""Modules in the working directory, which a new Python finds before any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.trust_rows.hostile.cases import CANARY, Act, cases_of, config
from tests import processes

_SHADOWS = ("torch", "yaml", "numpy", "lightning", "jsonargparse", "typing", "math", "re", "json", "operator", "shutil")
_SHADOWS += (
    "tomllib",
    "difflib",
    "textwrap",
    "argparse",
    "logging",
    "lit_efficient_x",
    "sitecustomize",
    "usercustomize",
)
_FRESH = (
    ["--version"],
    ["techniques"],
    ["configs"],
    ["fit", "--help"],
    ["fit", "-c", "hostile.yaml"],
    ["average", "x.ckpt", "--output", "y"],
)


@cases_of("shadow", [f"{module}" for module in _SHADOWS])
def _shadow(name: str) -> Act:
    Path(f"{name}.py").write_text(f"import os\nos.mkdir({CANARY!r})\n")
    return lambda: [_fresh(words) for words in _FRESH[:4]]


@cases_of("shadow-all", [words[0] + str(number) for number, words in enumerate(_FRESH)])
def _shadows(name: str) -> Act:
    config()
    for module in _SHADOWS:
        Path(f"{module}.py").write_text(f"import os\nos.mkdir({CANARY!r})\n")
    return lambda: _fresh(_FRESH[int(name[-1])])


def _fresh(words: list[str]) -> None:
    root = str(processes.ROOT)
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-m", "lit_efficient", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:], done.stderr[-2000:])
    assert done.returncode in (0, 2), done.stderr[-300:]

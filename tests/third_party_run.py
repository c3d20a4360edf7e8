"""What a process does in which a package of somebody else's is installed; the test reads what it prints.

Run with the package's folder on ``PYTHONPATH``, in an empty folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
import yaml

from lit_efficient.__main__ import main
from lit_efficient.application.recorded import replay
from lit_efficient.errors import ConfigurationError
from tests.cli.toy_runs import BASE
from tests.support_cli import ToyModel

MARK = Path("clamp_kit_was_imported")


def _run(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main([*arguments])
    return code, said.getvalue()


def _largest() -> float:
    assert ToyModel.last is not None
    return max(float(p.detach().abs().max()) for p in ToyModel.last.parameters())


def run() -> dict[str, object]:
    """Name the technique in every place; say what happened, and when the package was imported."""
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    fit = ("fit", "--allow-import", "tests", "-c", "base.yaml")
    found: dict[str, object] = {}
    checkpoint = {"lit_efficient": {"transforms": [{"name": "Clamp", "arguments": {"bound": 0.5}}]}}
    try:
        replay(torch.nn.Linear(1, 1), checkpoint)
    except ConfigurationError as error:
        found["checkpoint"] = str(error)
    found["plain"], _ = _run(*fit)
    found["largest without"] = _largest()
    found["imported before it is named"] = MARK.exists()
    found["unregistered"] = _run(*fit, "--trainer.callbacks+=clamp_kit.clamp.Unregistered")
    found["imported when refused"] = MARK.exists()
    found["short"] = _run(*fit, "--trainer.callbacks+=Clamp", "--trainer.callbacks.bound=0.0625")
    found["largest with"] = _largest()
    found["imported when named"] = MARK.exists()
    found["full"], _ = _run(*fit, "--trainer.callbacks+=clamp_kit.clamp.Clamp")
    overlay = {"trainer": {"callbacks+": [{"class_path": "Clamp"}, "StochasticDepth"]}}
    Path("overlay.yaml").write_text(yaml.safe_dump(overlay))
    found["conflict"] = _run(*fit, "-c", "overlay.yaml")
    try:
        replay(torch.nn.Linear(1, 1), checkpoint)
        found["checkpoint once imported"] = "fits"
    except ConfigurationError as error:
        found["checkpoint once imported"] = str(error)
    return found


if __name__ == "__main__":
    result = run()
    json.dump(result, sys.stdout)

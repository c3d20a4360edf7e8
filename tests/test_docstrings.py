"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in (ROOT / "lit_efficient").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


DEAR = {"compare": [pytest.mark.turns(2, family="whole comparisons")]}


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=DEAR.get(path.stem, ())) for path in FILES])
def test_the_examples_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    done = doctest.testmod(module)
    assert done.attempted > done.failed == 0
    assert "+SKIP" not in path.read_text(encoding="utf-8")

"""The package and its documents are written in plain words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD = re.compile(r"\b(told|whence|stood|likewise)\b", re.IGNORECASE)
PLACES = ["lit_efficient/**/*.py", "configs/**/*.yaml", "docs/*.[mp][dy]"]
PLACES += ["README.md", "AGENTS.md", "CONTRIBUTING.md", "LOG.md"]


@pytest.mark.parametrize("place", PLACES)
def test_no_word_that_a_newcomer_looks_up(place: str) -> None:
    files = sorted(ROOT.glob(place))
    assert files
    found = [f"{path.relative_to(ROOT)}: {word}" for path in files for word in OLD.findall(path.read_text("utf-8"))]
    assert not found

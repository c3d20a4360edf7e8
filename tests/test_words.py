"""The package, its documents and its tests are written in plain words."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD = re.compile(r"\b(told(?! apart)|whence|stood|likewise)\b", re.IGNORECASE)
PLACES = ["lit_efficient/**/*.py", "configs/**/*.yaml", "docs/*.[mp][dy]"]
PLACES += ["README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml"]


def prose(source: str) -> str:
    """Comments and docstrings; a test may give a name what was told."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(t.string for t in tokens if t.type == tokenize.COMMENT or t.string.startswith('"""'))


@pytest.mark.parametrize("place", [*PLACES, "tests/**/*.py"])
def test_no_word_that_a_newcomer_looks_up(place: str) -> None:
    texts = {path: path.read_text("utf-8") for path in sorted(ROOT.glob(place)) if path != Path(__file__)}
    assert texts
    if place.startswith("tests"):
        texts = {path: prose(text) for path, text in texts.items() if OLD.search(text)}
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in texts.items() for word in OLD.findall(text)]
    assert not found

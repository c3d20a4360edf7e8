"""The README says what the code says, and the example does what the README shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from lit_efficient.catalog import read_cards
from lit_efficient.commands.catalog_text import markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_techniques_is_the_one_that_the_code_generates() -> None:
    table = README.split("techniques --markdown -->\n")[1].split("<!-- /techniques -->")[0]
    assert table.strip() == markdown(read_cards()).strip(), "run: python -m lit_efficient techniques --markdown"


def test_every_file_that_it_links_to_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.turns(4, family="learns")
def test_the_example_learns_and_says_what_the_readme_shows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = runpy.run_path(str(ROOT / "examples" / "add_to_existing_code.py"))["main"](max_epochs=6)
    report = README.split("```\nTechniques:\n")[1].split("```")[0]
    assert " ".join(report.split()) in " ".join(caplog.text.split())  # the README wraps a long line
    assert trainer.callback_metrics["train/loss"] < 1.0  # of a variance of 1.5

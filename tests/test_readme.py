"""The README says what the code says, and the example does what the README shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_fits_two_screens_and_begins_with_commands() -> None:
    assert len(README.splitlines()) <= 110
    first = README.split("```bash\n")[1].split("\n")[0]
    assert first == "pip install -c constraints.txt -e . && python -m lit_efficient fit -c language_model"


@pytest.mark.turns(4, family="learns")
def test_the_example_learns_and_says_what_the_readme_shows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = runpy.run_path(str(ROOT / "examples" / "add_to_existing_code.py"))["main"](max_epochs=6)
    report = README.split("```\nTechniques:\n")[1].split("```")[0]
    assert " ".join(report.split()) in " ".join(caplog.text.split())  # the README wraps a long line
    assert trainer.callback_metrics["train/loss"] < 1.0  # of a variance of 1.5

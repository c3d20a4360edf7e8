"""The README says what the code says, and the example does what the README shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from torch import nn

from benchmarks import savings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_prose_fits_two_screens_and_it_begins_with_commands() -> None:
    """The tables of figures, cards and families, the picture's line and the code blocks are not prose."""
    assert len(README.splitlines()) <= 180
    prose = re.sub(r"^```.*?^```\n|^\|.*?\n|^<!-- .*?\n", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len([line for line in prose.splitlines() if line]) <= 80
    cloning, commands = (block.splitlines() for block in README.split("```bash\n")[1:3])
    assert cloning[0].startswith("git clone ADDRESS ")
    assert cloning[1] == "python3 -m venv .venv && . .venv/bin/activate"
    assert commands[0] == "pip install -c constraints.txt -e . && python -m lit_efficient fit -c language_model"
    assert commands[1] == "pip install -c constraints.txt -e '.[test]' && pytest"


def test_the_picture_shows_the_records() -> None:
    assert savings.FILE.read_text("utf-8") == savings.picture(), "run: python -m benchmarks.savings"
    assert "](docs/savings.svg)" in README
    shown = {one.name: one for one in savings.savings()}
    assert shown["ActivationCheckpointing"].memory < 0.6  # of the memory without it
    assert shown["ActivationCheckpointing"].same
    assert not shown["LoRA"].same
    assert "EMA" not in shown  # it saves no memory


def test_the_example_of_apply_changes_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "apply(network" in block)
    names: dict[str, object] = {}
    exec(code, names)
    network = names["network"]
    assert isinstance(network, nn.Module)
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    assert re.match(r"\d+ layers, lora of rank 4: ", capsys.readouterr().out)


@pytest.mark.turns(4, family="learns")
def test_the_example_learns_and_says_what_the_readme_shows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = runpy.run_path(str(ROOT / "examples" / "add_to_existing_code.py"))["main"](max_epochs=6)
    report = README.split("```\nTechniques:\n")[1].split("```")[0]
    assert " ".join(report.split()) in " ".join(caplog.text.split())  # the README wraps a long line
    assert trainer.callback_metrics["train/loss"] < 1.0  # of a variance of 1.5

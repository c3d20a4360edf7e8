"""Techniques of other packages: found by their metadata, imported when a config names them, never by a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.processes import python
from tests.third_party_package import install


def _python(cwd: Path, *arguments: str, packages: list[Path]) -> subprocess.CompletedProcess[str]:
    """A fresh process in which ``packages`` are installed."""
    cwd.mkdir(exist_ok=True)
    return python(*arguments, cwd=cwd, path=packages)


@pytest.mark.turns(4, family="whole programs")
def test_a_config_names_it_and_a_checkpoint_cannot(tmp_path: Path) -> None:
    install(tmp_path / "site")
    done = _python(tmp_path / "run", "-m", "tests.third_party_run", packages=[tmp_path / "site"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["checkpoint"] == "the checkpoint uses the technique 'Clamp': import its class first"
    assert found["imported before it is named"] is False
    code, said = found["unregistered"]  # beside a registered class, and of its package: code like any other
    assert code == 2
    assert "--allow-import clamp_kit" in said
    assert found["imported when refused"] is False
    assert found["short"][0] == found["full"] == found["plain"] == 0, found
    assert found["largest with"] == 0.0625 < found["largest without"]
    assert found["imported when named"] is True
    code, said = found["conflict"]
    assert code == 2
    assert "Clamp cannot be combined with StochasticDepth: for the sake of the example" in said
    assert found["checkpoint once imported"] == "fits"


@pytest.mark.turns(4, family="whole programs")
def test_the_catalogue_lists_it_without_importing_it(tmp_path: Path) -> None:
    install(tmp_path / "site", entries="Clamp = clamp_kit.clamp:Clamp\nLoRA = clamp_kit.clamp:Clamp")
    here = tmp_path / "run"
    said = [
        _python(here, "-m", "lit_efficient", "techniques", *words, packages=[tmp_path / "site"])
        for words in ([], ["clamp"], ["--matrix"], ["--markdown"])
    ]
    assert [done.returncode for done in said] == [0, 0, 0, 0]
    table, card, matrix, markdown = (done.stdout for done in said)
    below = table.partition("\nothers\n")[2].splitlines()
    assert below[0].split(maxsplit=1) == ["Clamp", "Clamp weights to [-bound, bound] after each step."]
    assert "Clamp is a technique of the package clamp-kit 1.2" in table
    assert said[0].stderr == "note: LoRA of clamp-kit 1.2 is not used: the name is ours\n"
    assert card.startswith("Clamp   (slot trainer.callbacks)")
    assert "Clamp(bound: float=0.125)" in card
    assert "bound: The largest weight, above 0." in card
    assert "CONSTRAIN" in card
    assert "Clamp\n  not with StochasticDepth: for the sake of the example\n" in matrix
    assert "Clamp" not in markdown  # the README is ours
    assert list(here.iterdir()) == []


@pytest.mark.turns(4, family="whole programs")
def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    install(tmp_path / "site")
    entries = ["Clamp = other_kit.clamp:Clamp", "Bound = other_kit.clamp:Clamp", "Odd = other-kit!"]
    install(tmp_path / "more", "other_kit", "other-kit", "\n".join(entries))
    reasons = [
        "Clamp is registered by clamp-kit 1.2 and other-kit 1.2: uninstall one",
        "other-kit 1.2 registers other_kit.clamp.Clamp as 'Bound'",
        "other-kit 1.2 registers other-kit! as 'Odd'",
    ]
    packages = [tmp_path / "site", tmp_path / "more"]
    listed = _python(tmp_path / "run", "-m", "lit_efficient", "techniques", packages=packages)
    assert listed.returncode == 0
    assert all(reason in listed.stderr for reason in reasons)
    assert not {line.split(" ")[0] for line in listed.stdout.splitlines()} & {"Clamp", "Bound", "Odd"}
    (tmp_path / "run" / "c.yaml").write_text("trainer:\n  callbacks:\n    - class_path: Clamp\n")
    run = _python(tmp_path / "run", "-m", "lit_efficient", "fit", "-c", "c.yaml", packages=packages)
    assert run.returncode == 2
    assert reasons[0] in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run" / "clamp_kit_was_imported").exists()

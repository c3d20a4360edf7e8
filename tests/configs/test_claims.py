"""What the first lines of an overlay say of the tasks that it is for, and the command there, is tried by `check`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lit_efficient.__main__ import main
from lit_efficient.files.configs import known

OVERLAYS = {name: path for name, path in known().items() if path.parent.name in ("techniques", "loggers")}
TASKS = [name for name, path in known().items() if path.parent.name == "tasks"]
PLACES = {
    "any task": TASKS,
    "a language model": ["language_model"],
    "a language model or another transformer": ["language_model", "latent_diffusion"],
    "a transformer": ["language_model", "latent_diffusion"],
    "a diffusion task": ["latent_diffusion"],
}
# Configs of the reader's own, as the overlays ask for them: without the callbacks of our tasks.
MINE = {"exact_resume": known()["language_model"], "fast_matmul": known()["language_model"]}
# Of what is not here: a GPU, teachers from a hub or a folder, a config and a base that a reader has, two loggers.
ABSENT = (
    r"device is 'cpu'|needs a GPU|couldn't connect|path/to|there is no folder runs/|'(mlflow|comet-ml)' is not inst"
)


def header(name: str) -> str:
    lines = OVERLAYS[name].read_text("utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def check(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return why the config of a command line is refused, or an empty string."""
    capsys.readouterr()
    code = main(["check", *words])
    said = capsys.readouterr().err
    return "" if code == 0 else said[said.index("error: ") :]


@pytest.mark.turns(20)
@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_goes_with_the_tasks_that_it_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = re.search(r"Append it to (.*?)(?: on a GPU.*?| that trains on a GPU)?:? python -m", header(name))
    for task in PLACES.get(place[1], ()) if place else ():
        refusal = check(["-c", task, "-c", name], capsys)
        assert not refusal or re.search(ABSENT, refusal), f"{task}: {refusal}"


@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
@pytest.mark.turns(20)
@pytest.mark.parametrize("name", OVERLAYS)
def test_the_command_of_an_overlay_is_accepted(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = re.search(r"#   python -m lit_efficient fit (.*)", OVERLAYS[name].read_text("utf-8"))
    if command is None:
        assert name in ("quantize_base", "sharded_strategy")  # a part of qlora, and of several processes
        return
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command[1])
    if name in MINE:
        config = yaml.safe_load(MINE[name].read_text("utf-8"))
        config["trainer"].pop("callbacks", None)
        Path("mine.yaml").write_text(yaml.safe_dump(config))
    elif "mine.yaml" in words:
        assert "task of your own" in header(name)
        return
    refusal = check(words, capsys)
    assert not refusal or re.search(ABSENT, refusal), refusal


def test_most_overlays_say_where_they_go() -> None:
    said = [name for name in OVERLAYS if "Append it to" in header(name)]
    assert len(OVERLAYS) - len(said) <= 1  # quantize_base says what to add
    assert sum("Append it to any task:" in header(name) for name in said) > 30

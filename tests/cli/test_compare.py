"""Tests of ``compare`` on a plain module: the table, the files, the exit code, and a second call that adds nothing."""

import json
from pathlib import Path

import pytest
import yaml

from lit_efficient.__main__ import main
from tests.cli.toy_runs import ALLOW

QUICK = ["--steps", "4", "--validations", "2", "--seeds", "1", "--narrow", "0"]


def compare(*arguments: str) -> int:
    return main(["compare", *ALLOW, "-c", "base.yaml", *arguments])


@pytest.mark.turns(2, family="whole comparisons")
def test_a_strangers_module_is_compared_and_the_same_command_goes_on(capsys):
    Path("twice.yaml").write_text(yaml.safe_dump({"trainer": {"accumulate_grad_batches": 2}}))
    Path("wrong.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"hidden": 0}}}))
    Path("others.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"rows": 4}}}))
    command = ["--with", "twice.yaml", "--with", "wrong.yaml", *QUICK, "--forgetting", "others.yaml"]
    assert compare(*command) == 0
    said = capsys.readouterr()
    for word in ("baseline", "twice", "all", "val/loss", "hidden must be at least 1", "forgetting"):
        assert word in said.out
    assert "seed 0" in said.err
    for words in (
        "4 variants (baseline, twice, wrong, all) for 4 steps, 1 times each",
        "trainings of 4 steps, each about",
    ):
        assert words in said.err
    (folder,) = Path("runs/compare").iterdir()
    names = {"about.json", "rows.jsonl", "comparison.html", "comparison.md", "comparison.csv"}
    assert {path.name for path in folder.iterdir() if path.suffix != ".log"} == names
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    amounts = {row["run"]["variant"]: row["run"]["amounts"] for row in rows}
    assert amounts["baseline"] == [2] * 4
    assert amounts["twice"] == [4] * 4
    assert "-c base.yaml --with twice.yaml --with wrong.yaml" in (folder / "comparison.md").read_text()

    assert compare(*command) == 0
    assert "seed" not in capsys.readouterr().err
    assert len((folder / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert compare(*command, "--metric", "nothing") == 2
    assert "val/loss" in capsys.readouterr().err
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--with", "ema", "--model.hidden", "0"], "hidden must be at least 1"),
        ([], "--with"),
        (["--with", "emma"], "did you mean 'ema'"),
        (["--with", "ema", "--forgetting", "none.yaml"], "none.yaml"),
        (["--with", "ema", "--steps", "0"], "steps"),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, arguments, said):
    assert compare(*QUICK, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error[error.index("error: ") :]
    assert "Traceback" not in error

"""Groups of arguments: from YAML, from an overlay and the command line field by field, and under their old keys."""

from typing import Any

import pytest
import yaml

from tests.cli.toy_runs import refused
from tests.support_cli import Parts

CONFIG = {
    "model": {"class_path": "LanguageModeling"},
    "data": {
        "class_path": "LanguageData",
        "init_args": {"max_length": 64, "chat": {"train_on": "all", "vocab_size": 300}, "rows": {"max_rows": 9}},
    },
}


def built(config: dict[str, Any], *arguments: str) -> Any:
    with open("run.yaml", "w") as file:
        yaml.safe_dump(config, file)
    return Parts(args=["fit", "-c", "run.yaml", *arguments]).datamodule


def test_a_group_is_a_block_of_which_an_overlay_or_the_command_line_sets_a_field():
    with open("overlay.yaml", "w") as file:
        yaml.safe_dump({"data": {"init_args": {"chat": {"truncation": "left"}}}}, file)
    data = built(CONFIG, "-c", "overlay.yaml", "--data.init_args.chat.vocab_size=400", "--data.rows.max_rows", "7")
    assert (data.chat.train_on, data.chat.truncation, data.chat.vocab_size) == ("all", "left", 400)
    assert (data.rows.max_rows, data.rows.split, data.max_length) == (7, "train", 64)


def test_a_field_that_is_wrong_is_named_with_its_group(capsys):
    wrong = ["--data", "LanguageData"]
    assert "LanguageData: rows.max_rows must be" in refused(capsys, *wrong, "--data.rows.max_rows=0")
    said = refused(capsys, *wrong, "--data.chat.trian_on=all")
    assert "chat.trian_on" in said
    assert "did you mean 'chat.train_on'" in said


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("LanguageData", "chat_template: chatml", "chat.template"),
        ("LanguageData", "streaming: true", "stream.enabled"),
        ("PreferenceData", "too_long: left", "chat.too_long"),
        ("PythonCorpus", "paths: [a]", "files.paths"),
    ],
)
def test_a_key_that_moved_is_refused_with_the_new_one(name, old, new, capsys):
    with open("old.yaml", "w") as file:
        file.write(f"data:\n  class_path: {name}\n  init_args:\n    {old}\n")
    key = old.partition(":")[0]
    assert refused(capsys, "-c", "old.yaml").splitlines() == [
        f"error: data: {name}: no option {key!r}: it is now {new!r}",
        "  in old.yaml, line 4",
    ]
    said = refused(capsys, "--data", name, f"--data.{key}={old.partition(': ')[2]}")
    assert said.strip() == f"error: data: {name}: no option {key!r}: it is now {new!r}"


def test_a_block_that_moved_is_told_by_what_is_in_it(capsys):
    with open("old.yaml", "w") as file:
        file.write("data:\n  class_path: LanguageData\n  init_args:\n    columns: {text: body}\n")
    said = refused(capsys, "-c", "old.yaml")
    assert "error: data: LanguageData: no option 'columns.text': it is now 'rows.columns.text'" in said

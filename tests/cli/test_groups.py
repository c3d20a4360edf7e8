"""Groups of arguments: from YAML, from an overlay and the command line field by field, and under their old keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_efficient.__main__ import main
from tests.cli.toy_runs import OVERLAYS, refused
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
    ("name", "given", "meant"),
    [
        ("LanguageData", "train_on: all", "chat.train_on"),
        ("LanguageData", "columns: text", "rows.columns"),
        ("LanguageData", "columns: {text: body}", "rows.columns"),
        ("PythonCorpus", "paths: [a]", "files.paths"),
    ],
)
def test_a_key_without_its_group_is_refused_with_its_full_name(name, given, meant, capsys):
    with open("flat.yaml", "w") as file:
        file.write(f"data:\n  class_path: {name}\n  init_args:\n    {given}\n")
    first, *rest = refused(capsys, "-c", "flat.yaml").splitlines()
    assert first.startswith(f"error: data: {name}: no option {given.partition(':')[0]!r}"[:-1])
    assert first.endswith(f"did you mean {meant!r}?")
    assert rest[0] == "  in flat.yaml, line 4"


PRETRAIN = str(OVERLAYS / "llm" / "pretrain.yaml")
PART = "model:\n  init_args:\n    model:\n      config_fields:\n        "


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("overlay", "options", "changed"),
    [
        ("hidden_size: 64", [], {"hidden_size": 64}),
        ("", ["config_fields.hidden_size=64"], {"hidden_size": 64}),
        (
            "hidden_size: 64\n        layer_types: [full_attention]",
            ["config_fields.rope_parameters.theta=5", "config_fields.hidden_size=32"],
            {"hidden_size": 32, "layer_types": ["full_attention"], "rope_parameters": {"theta": 5}},
        ),
        ("model_type: llama\n        vocab_size: 9", [], None),
        ("", ["dtype=bfloat16"], {}),
    ],
)
def test_a_part_of_a_models_configuration_is_changed_and_the_rest_stays(
    overlay: str, options: list[str], changed: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("part.yaml").write_text(f"{PART}{overlay}" if overlay else "{}")
    given = [f"--model.init_args.model.{option}" for option in options]
    assert main(["fit", "-c", PRETRAIN, *(["-c", "part.yaml"] if overlay else []), *given, "--print_config"]) == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["model"]
    shipped = yaml.safe_load(Path(PRETRAIN).read_text())["model"]["init_args"]["model"]["config_fields"]
    expected = {"model_type": "llama", "vocab_size": 9} if changed is None else {**shipped, **changed}
    assert model["config_fields"] == expected
    assert model["dtype"] == ("bfloat16" if options == ["dtype=bfloat16"] else "float32")


def test_a_part_without_the_rest_is_refused_by_the_class_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("part.yaml").write_text(f"{PART}hidden_size: 64")
    assert main(["fit", "--model", "LanguageModeling", "--data", "PythonCorpus", "-c", "part.yaml"]) == 2
    assert "CausalLMConfig: name_or_path must be" in capsys.readouterr().err


GPT = "model: {class_path: LanguageModeling, init_args: {model: {dim: 64}}}\ndata: PythonCorpus"
HUGGING_FACE = "model: {class_path: LanguageModeling, init_args: {model: {name_or_path: base}}}\ndata: PythonCorpus"


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (HUGGING_FACE, "--model.model.max_length=64", "CausalLMConfig.model: no option 'max_length'"),
        (HUGGING_FACE, "--model.init_args.model.dim=64", "CausalLMConfig.model: no option 'dim'"),
        (HUGGING_FACE, "model: {init_args: {model: {max_length: 64}}}", "CausalLMConfig.model: no option 'max_length'"),
        (GPT, "--model.model.name_or_path=x", "GPTConfig.model: no option 'name_or_path'"),
        (GPT, "--model.model.config_fields.hidden_size=64", "GPTConfig.model: no option 'config_fields'"),
        (GPT, "model: {init_args: {model: {dtype: bfloat16}}}", "GPTConfig.model: no option 'dtype'"),
    ],
)
def test_a_field_never_changes_which_model_was_named(
    config: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(config)
    Path("part.yaml").write_text(given)
    assert said in refused(capsys, "-c", "run.yaml", *([given] if given.startswith("--") else ["-c", "part.yaml"]))


def test_a_name_has_no_fields_and_null_is_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    distillation = str(OVERLAYS / "llm" / "distillation.yaml")
    said = refused(capsys, "-c", distillation, "--model.teacher.dtype=bfloat16")
    assert "no option 'dtype': 'runs/llm/base' is a name, without fields" in said
    assert "CausalLMConfig: name_or_path must be" in refused(capsys, "-c", PRETRAIN, "--model.model.config_fields=null")
    Path("run.yaml").write_text(HUGGING_FACE)
    assert main(["fit", "-c", "run.yaml", "--model.model.config_fields=null", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["model"]
    assert (shown["name_or_path"], shown["config_fields"]) == ("base", None)


def test_options_name_a_model_field_by_field(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model.model.name_or_path=x", "--model.model.dtype=bfloat16", "--print_config"]
    assert main(["fit", "--model=LanguageModeling", "--data=PythonCorpus", *options]) == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["model"]
    assert (model["name_or_path"], model["dtype"]) == ("x", "bfloat16")

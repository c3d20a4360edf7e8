"""Configs are found by name from any folder; a path comes first, and an unknown name is answered with those like it."""

from pathlib import Path

import pytest

from lit_efficient.errors import ConfigurationError
from lit_efficient.files import configs

ROOT = Path(__file__).parents[2] / "configs"


def test_each_config_has_a_name_of_its_own() -> None:
    """So no name stands in both of the folders that need none in front of it."""
    known = configs.known()
    assert sorted(known.values()) == sorted(ROOT.rglob("*.yaml"))
    assert all(Path(configs.find(name)) == path for name, path in known.items())


def test_one_that_is_in_two_folders_is_found_by_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(configs.find("lora")) == Path(configs.find("techniques/lora")) == ROOT / "techniques" / "lora.yaml"
    assert Path(configs.find("llm/lora")) == ROOT / "llm" / "lora.yaml"
    (tmp_path / "lora").mkdir()  # a folder is no config
    assert Path(configs.find("lora")) == ROOT / "techniques" / "lora.yaml"


def test_a_path_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ema").write_text("{}")
    assert configs.find("ema") == "ema"


@pytest.mark.parametrize(
    "given", ["{trainer: {max_steps: 1}}", "-", "--trainer.max_steps", "s3://a/b.yaml", "a: b", ""]
)
def test_what_is_no_name_is_left_to_the_parser(given: str) -> None:
    assert configs.find(given) == given


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("languge_model", "did you mean 'language_model'?"),
        ("dora", "did you mean 'llm/dora'?"),
        ("configs/llm/lora.yaml", "did you mean 'llm/lora' or 'lora'?"),  # as from a checkout
        ("wandb", "did you mean 'loggers/wandb'?"),
        ("llm/language_model", "did you mean 'language_model'?"),
        ("zzz", "there is no file 'zzz'\n"),
    ],
)
def test_an_unknown_name_is_answered_with_those_like_it(
    given: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        configs.find(given)
    assert near in str(caught.value)
    assert "python -m lit_efficient configs" in str(caught.value)


def test_its_line_in_the_list_is_a_whole_sentence() -> None:
    for name, path in configs.known().items():
        first = path.read_text("utf-8").splitlines()[0]
        summary = configs.summary(path)
        assert 10 < len(summary) <= 120, name
        assert first.partition(summary)[2][:1] in set(".:"), f"{name}: its first sentence ends on the first line"

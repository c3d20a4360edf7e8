"""``configs`` lists what comes along, ``copy`` writes one: what was copied runs as what it was copied from."""

import json
from pathlib import Path

import pytest

from lit_efficient.__main__ import main
from lit_efficient.cli.arguments import read_command
from lit_efficient.commands.configs import lines
from lit_efficient.files import configs
from tests.support_cli import Parts


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_list_names_each_config_once_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    printed = capsys.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in printed if line.startswith("  "))
    assert told == {name: configs.summary(path) for name, path in configs.known().items()}
    assert main(["configs", "--json"]) == 0
    assert {name: each["summary"] for name, each in json.loads(capsys.readouterr().out).items()} == told


def test_the_list_fits_the_terminal() -> None:
    assert max(len(line) for line in list(lines(80))[:-1]) <= 80


def test_a_copy_is_the_same_run_and_is_never_overwritten_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", "language_model"]) == 0
    assert "-c language_model.yaml" in capsys.readouterr().out
    copied = Path("language_model.yaml")
    assert copied.read_bytes() == configs.known()["language_model"].read_bytes()
    copied.write_text("mine")
    assert main(["copy", "language_model"]) == 2
    assert "--force" in capsys.readouterr().err
    assert copied.read_text() == "mine"
    assert main(["copy", "language_model", "--force"]) == 0
    assert copied.read_text() != "mine"
    Path("folder").mkdir()
    assert main(["copy", "llm/lora", "folder"]) == 0
    assert Path("folder/lora.yaml").read_bytes() == configs.known()["llm/lora"].read_bytes()
    assert main(["copy", "langage_model", "b.yaml"]) == 2
    assert "did you mean 'language_model'?" in capsys.readouterr().err
    assert not Path("b.yaml").exists()


def test_a_name_stands_for_its_file_from_any_folder() -> None:
    by_name = ["fit", "-c", "llm/lora", "--config=ema", "--config", "loggers/csv"]
    paths = [str(configs.known()[name]) for name in ("llm/lora", "ema", "loggers/csv")]
    assert read_command(by_name).configs == paths
    parts = Parts(args=["fit", "-c", "latent_diffusion", "-c", "ema"])
    assert "EMA" in {type(callback).__name__ for callback in parts.trainer.callbacks}
    assert parts.config.fit.trainer.default_root_dir == "runs/latent_diffusion"

"""The configs of the tasks run, and so does what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.configs.following import CONFIGS, fit_and_follow, small

TASKS = CONFIGS / "tasks"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_task_is_tested() -> None:
    assert {path.stem for path in TASKS.glob("*.yaml")} == {"autoencoder", "language_model", "latent_diffusion"}


@pytest.mark.turns(4, family="shipped configs")
def test_a_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        Path(f"{number}.py").write_text("def main(reader, writer):\n    return reader.read(writer)\n" * 60)
    data = {"vocab_size": 280, "sequence_length": 16, "val_batch_size": 2, "val_fraction": 0.3}
    data["files"] = {"paths": ["."]}
    model = {"model": {"dim": 16, "depth": 1, "num_heads": 2, "max_length": 256}}
    path = small(TASKS / "language_model.yaml", model=model, data=data)
    assert fit_and_follow(capsys, path) == ["generate", "export", "report"]
    # Adapters beside weights that were drawn: no file holds them, so nothing that needs them is printed.
    assert "generate" not in fit_and_follow(capsys, path, "-c", "lora")


@pytest.mark.turns(4, family="shipped configs")
def test_an_autoencoder(capsys: pytest.CaptureFixture[str]) -> None:
    path = small(TASKS / "autoencoder.yaml", data={"image_size": 8, "batch_size": 4})
    assert "validate" in fit_and_follow(capsys, path)


@pytest.mark.turns(4, family="shipped configs")
def test_latent_diffusion(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"image_size": 8, "batch_size": 4, "autoencoder": {"width": 8}, "autoencoder_steps": 2, "judge_steps": 2}
    model = {"backbone": {"size": 2, "width": 16, "depth": 1, "heads": 2}, "sampling_steps": 1}
    assert "sample" in fit_and_follow(capsys, small(TASKS / "latent_diffusion.yaml", model=model, data=data))

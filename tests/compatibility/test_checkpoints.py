"""Checkpoints of commit 1b73bea still load, compute what they computed, and train on: see `make`.

Numbers are compared within a tolerance: processors add up in different orders and differ in a float32's last digits,
1e-6 of the number and more after some optimizer steps. What was stored and not computed must be there bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compatibility import observed
from tests.compatibility.cases import CASES, FILES, SAVED_AT
from tests.support import assert_equal

EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
COMPUTED = {"rtol": 1e-5, "atol": 2e-6}  # one forward pass
TRAINED = {"rtol": 1e-4, "atol": 2e-4}  # three optimizer steps, and sums over a tensor
IN_BFLOAT16 = {"rtol": 1e-2, "atol": 5e-3}  # Muon's iteration

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # other folders than those of 1b73bea's runs
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
    pytest.mark.filterwarnings("ignore:ckpt_path. the checkpoint does not hold what its optimizer"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files name each other without a path, and no test writes among them."""
    monkeypatch.chdir(FILES)
    before = {path: path.stat().st_mtime for path in FILES.rglob("*")}
    yield
    assert {path: path.stat().st_mtime for path in FILES.rglob("*")} == before


def close(found: Any, expected: Any, tolerance: dict[str, float], path: str = "") -> None:
    """Numbers within the tolerance, everything else equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name, value in expected.items():
            close(found[name], value, tolerance, f"{path}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, value in enumerate(expected):
            close(found[i], value, tolerance, f"{path}/{i}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance["rtol"], abs=tolerance["atol"]), path
    else:
        assert found == expected, path


def test_every_run_has_its_file() -> None:
    others = {"alone", "fit", "mixed"}
    assert {path.stem for path in FILES.glob("*.ckpt")} == {*CASES, *others}
    assert EXPECTED["resumed"].keys() == EXPECTED["restored"].keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(name: str, tmp_path: Path) -> None:
    """With the optimizer's states as they are in the file, to where it ended then."""
    seen, notes = observed.resumed(name, tmp_path)
    stored = torch.load(f"{name}.ckpt", map_location="cpu", weights_only=True)
    assert notes.began["global_step"] == stored["global_step"] == SAVED_AT
    assert_equal(notes.began["optimizer_states"], stored["optimizer_states"])
    close(seen, EXPECTED["resumed"][name], IN_BFLOAT16 if name == "muon" else TRAINED)


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_rebuilt_without_a_trainer(name: str) -> None:
    close(observed.restored(name), EXPECTED["restored"][name], COMPUTED)


@pytest.mark.parametrize("name", observed.PLAIN)
def test_lightning_loads_a_task(name: str) -> None:
    close(observed.loaded(name), EXPECTED["loaded"][name], COMPUTED)


def test_images_are_sampled_by_the_checkpoint_alone() -> None:
    close(observed.sampled(), EXPECTED["sampled"], {"rtol": 0, "atol": 0.5})  # of 255


def test_a_cache_of_latents_is_read(tmp_path: Path) -> None:
    close(observed.latent_means(tmp_path), EXPECTED["latents"], COMPUTED)


# The command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", observed.WRITERS)
def test_generate(name: str) -> None:
    assert observed.generated(f"{name}.ckpt") == EXPECTED["generated"][name]


@pytest.mark.parametrize("name", observed.EXPORTS)
def test_export(name: str, tmp_path: Path) -> None:
    close(observed.exported(name, tmp_path), EXPECTED["exported"][name], COMPUTED)


def test_average(tmp_path: Path) -> None:
    files = ["muon.ckpt", "schedule_free.ckpt"]
    observed.command("average", *files, "--weights", "1,3", "--output", str(tmp_path / "mean.ckpt"))
    one, two, mean = (torch.load(file, weights_only=True) for file in [*files, tmp_path / "mean.ckpt"])
    assert mean["state_dict"].keys() == one["state_dict"].keys()
    for name, tensor in mean["state_dict"].items():
        expected = 0.25 * one["state_dict"][name] + 0.75 * two["state_dict"][name]
        torch.testing.assert_close(tensor, expected, **COMPUTED)


def test_ema_sweep(tmp_path: Path) -> None:
    close(observed.swept(tmp_path), EXPECTED["swept"], COMPUTED)


def test_fit_and_validate(tmp_path: Path) -> None:
    close(observed.fitted(tmp_path), EXPECTED["fitted"], TRAINED)


def test_fit_of_classes_that_keep_what_the_config_names(tmp_path: Path) -> None:
    close(observed.fitted_mixed(tmp_path), EXPECTED["fitted_mixed"], TRAINED)

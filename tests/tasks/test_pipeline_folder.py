"""What a pipeline's folder of diffusers declares about its network is not contradicted in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest

from lit_efficient import ConfigurationError, DiffusersModelConfig, LatentDiffusion
from lit_efficient.models.libraries.diffusers_model import declared_prediction

SCHEDULERS: dict[str, tuple[Any, str]] = {
    "stable diffusion 1.5": (diffusers.PNDMScheduler(skip_prk_steps=True), "eps"),
    "stable diffusion 2": (diffusers.DDIMScheduler(prediction_type="v_prediction"), "v"),
    "sdxl": (diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"), "eps"),
    "deepfloyd": (diffusers.DDPMScheduler(prediction_type="sample"), "x0"),
    "sd3": (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), "flow"),
    "sana": (diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True), "flow"),
    "playground 2.5": (diffusers.EDMEulerScheduler(), "edm"),
}


def folder_of(scheduler: Any, folder: Path) -> Path:
    """Write the scheduler of a pipeline, as it is in the folder, and an empty folder for the network."""
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "unet").mkdir()
    return folder


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_declared_target_is_read(name: str, tmp_path: Path) -> None:
    scheduler, expected = SCHEDULERS[name]
    folder = folder_of(scheduler, tmp_path)
    spec = DiffusersModelConfig(str(folder), subfolder="unet")
    assert declared_prediction(spec) == expected
    assert declared_prediction(DiffusersModelConfig(str(folder / "unet"))) is None
    text = (folder / "scheduler" / "scheduler_config.json").read_text()
    for line in text.splitlines(keepends=True):
        if '"prediction_type": "epsilon"' in line:  # older folders do not contain the default
            (folder / "scheduler" / "scheduler_config.json").write_text(text.replace(line, ""))
            assert declared_prediction(spec) == expected


@pytest.mark.parametrize("subfolder", ["unet", ""])
def test_another_target_is_refused_before_training(subfolder: str, tmp_path: Path) -> None:
    folder = folder_of(SCHEDULERS["sdxl"][0], tmp_path)
    spec = DiffusersModelConfig(str(folder / ("" if subfolder else "unet")), subfolder=subfolder)
    other = LatentDiffusion(spec, prediction="flow")
    right = LatentDiffusion(spec, prediction="eps", schedule="scaled_linear")
    if subfolder:
        with pytest.raises(ConfigurationError, match=r"prediction must be 'eps'.*without subfolder.*got 'flow'"):
            other.setup("fit")
    else:
        other.setup("fit")
    right.setup("fit")
    other.setup("test")

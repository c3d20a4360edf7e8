"""The settings of a pipeline's folder are read, are not contradicted without ``override``, and are shown in a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest

from lit_efficient import ConfigurationError, DiffusersModelConfig, LatentDiffusion
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.losses.timesteps import ResolutionShift, TimestepSampling
from lit_efficient.models.libraries.pipeline_folder import read_meaning

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STABLE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TABLE = DiffusionProcess("scaled_linear", 0.00085, 0.012)
FLOW = DiffusionProcess("flow")
ZERO = DiffusionProcess("scaled_linear", 0.00085, 0.012, zero_terminal_snr=True)
SCHEDULERS: dict[str, tuple[Callable[[], Any], str, DiffusionProcess, object]] = {
    "stable diffusion 1.5": (lambda: diffusers.PNDMScheduler(skip_prk_steps=True, **STABLE), "eps", TABLE, None),
    "stable diffusion 2": (lambda: diffusers.DDIMScheduler(prediction_type="v_prediction", **STABLE), "v", TABLE, None),
    "zero terminal snr": (
        lambda: diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing", **STABLE
        ),
        "v",
        ZERO,
        None,
    ),
    "ignored zero terminal snr": (
        lambda: diffusers.PNDMScheduler(prediction_type="v_prediction", skip_prk_steps=True, **STABLE),
        "v",
        TABLE,
        None,
    ),
    "sdxl": (lambda: diffusers.EulerDiscreteScheduler(**STABLE), "eps", TABLE, None),
    "deepfloyd": (
        lambda: diffusers.DDPMScheduler(prediction_type="sample", beta_schedule="squaredcos_cap_v2"),
        "x0",
        DiffusionProcess("squared_cosine"),
        None,
    ),
    "pixart": (
        lambda: diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02),
        "eps",
        DiffusionProcess("linear", 0.0001, 0.02),
        None,
    ),
    "lcm": (lambda: diffusers.LCMScheduler(**STABLE), "eps", TABLE, None),
    "sd3": (lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), "flow", FLOW, 3.0),
    "flow by heun": (lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=2.0), "flow", FLOW, 2.0),
    "flux": (
        lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9),
        "flow",
        FLOW,
        ResolutionShift(max_shift=0.9),
    ),
    "sana": (
        lambda: diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "flow",
        FLOW,
        3.0,
    ),
    "playground 2.5": (diffusers.EDMEulerScheduler, "edm", DiffusionProcess("edm", sigma_data=0.5), None),
}


def folder_of(scheduler: Any, folder: Path, **changed: Any) -> Path:
    """Write the scheduler of a pipeline, as it is in the folder, and an empty folder for the network."""
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "unet").mkdir()
    file = folder / "scheduler" / "scheduler_config.json"
    found = json.loads(file.read_text("utf-8")) | changed
    file.write_text(json.dumps({name: value for name, value in found.items() if value != "left out"}))
    return folder


@pytest.mark.parametrize("name", SCHEDULERS)
def test_target_process_and_shift_are_read(name: str, tmp_path: Path) -> None:
    make, prediction, process, shift = SCHEDULERS[name]
    left_out = {"prediction_type": "left out"} if prediction == "eps" else {}  # older files lack defaults
    folder = folder_of(make(), tmp_path, **left_out)
    for named in (DiffusersModelConfig(str(folder), subfolder="unet"), DiffusersModelConfig(str(folder / "unet"))):
        module = LatentDiffusion(named)
        assert (module.prediction, module.process) == (prediction, process)
        assert module.sampler.shift == module.timestep_sampling.shift == shift
    again = LatentDiffusion(**module.hparams)  # as from a checkpoint
    assert (again.process, again.sampler, again.timestep_sampling) == (
        module.process,
        module.sampler,
        module.timestep_sampling,
    )


def test_training_from_scratch_keeps_its_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    folder_of(SCHEDULERS["sdxl"][0](), folder)
    drawn = DiffusersModelConfig(str(folder), subfolder="unet", random_weights=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    for spec in (drawn, DiffusersModelConfig(str(alone)), LatentDiffusion().backbone):
        module = LatentDiffusion(spec)
        assert (module.prediction, module.process) == ("flow", FLOW)
        assert module.timestep_sampling == TimestepSampling("logit_normal")
        assert module.settings.lines() == []


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "target": ("sdxl", {"prediction": "v"}, "prediction_type", "prediction must be eps, as .* declares .*got 'v'"),
    "schedule by name": ("sdxl", {"schedule": "linear"}, "schedule", "schedule must be scaled_linear, betas 0.00085"),
    "betas": (
        "sdxl",
        {"schedule": DiffusionProcess("scaled_linear", beta_end=0.02)},
        "schedule",
        "schedule must be scaled_linear, betas 0.00085 to 0.012, .* got 'scaled_linear, betas 0.00085 to 0.02'",
    ),
    "zero terminal snr": (
        "zero terminal snr",
        {"schedule": DiffusionProcess("scaled_linear")},
        "schedule",
        "must be scaled_linear, betas 0.00085 to 0.012, zero_terminal_snr, as",
    ),
    "training shift": (
        "sd3",
        {"timestep_sampling": TimestepSampling(shift=2.0)},
        "timestep_shift",
        r"timestep_sampling.shift must be 3.0, as .* got 2.0",
    ),
    "sampling shift": ("flux", {"sampler": Sampler(shift=3.0)}, "timestep_shift", r"sampler.shift must be Resolution"),
    "empty prompt": (
        "sdxl",
        {"sampler": Sampler(empty_prompt="zeros")},
        "empty_prompt",
        "sampler.empty_prompt must be encoded, as",
    ),
}


def used(module: LatentDiffusion, **arguments: Any) -> object:
    """Return the value of an argument that the module uses, in the form in which it was given."""
    (name, value), *_ = arguments.items()
    if name == "schedule":
        return module.process.schedule if isinstance(value, str) else module.process
    found = getattr(module, name)
    if name in ("sampler", "timestep_sampling"):
        unset = {field.name: None for field in fields(value) if getattr(value, field.name) is None}
        return replace(found, **unset)
    return found


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_needs_an_override(name: str, tmp_path: Path) -> None:
    scheduler, arguments, setting, message = CONTRADICTIONS[name]
    folder = folder_of(SCHEDULERS[scheduler][0](), tmp_path)
    spec = DiffusersModelConfig(str(folder), subfolder="unet")
    with pytest.raises(ConfigurationError, match=message) as caught:
        LatentDiffusion(spec, **arguments)
    assert f"override: [{setting}]" in str(caught.value)
    assert str(folder) in str(caught.value)
    module = LatentDiffusion(spec, **arguments, override=[setting])
    assert used(module, **arguments) == next(iter(arguments.values()))
    again = LatentDiffusion(**module.hparams)
    assert (again.prediction, again.process, again.sampler) == (module.prediction, module.process, module.sampler)


def test_what_agrees_needs_no_override_and_noise_may_be_added(tmp_path: Path) -> None:
    spec = DiffusersModelConfig(str(folder_of(SCHEDULERS["sdxl"][0](), tmp_path)), subfolder="unet")
    module = LatentDiffusion(spec, "eps", "scaled_linear", "logit_normal", sampler=Sampler(empty_prompt="encoded"))
    assert module.process == TABLE
    assert module.timestep_sampling.distribution == "logit_normal"
    offset = DiffusionProcess("scaled_linear", offset_noise=0.1)
    assert LatentDiffusion(spec, schedule=offset).process.offset_noise == 0.1
    with pytest.raises(ConfigurationError, match=r"override must be one of prediction_type, .*got 'prediction'"):
        LatentDiffusion(spec, override=["prediction"])


UNSUPPORTED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "unknown class": (diffusers.DDPMScheduler, {"_class_name": "OwnScheduler"}, "'OwnScheduler' is no sched"),
    "unknown target": (
        diffusers.DDPMScheduler,
        {"prediction_type": "score"},
        "prediction_type must be one of epsilon, v_prediction, sample for DDPMScheduler, got 'score'",
    ),
    "own betas": (lambda: diffusers.DDPMScheduler(trained_betas=[0.001] * 1000), {}, "trained_betas"),
    "sigmoid": (lambda: diffusers.DDPMScheduler(beta_schedule="sigmoid"), {}, "beta_schedule 'sigmoid' has a table"),
    "other steps": (lambda: diffusers.DDPMScheduler(500), {}, "num_train_timesteps must be 1000, got 500"),
    "consistency": (diffusers.CMStochasticIterativeScheduler, {}, "num_train_timesteps must be 1000"),
    "score": (diffusers.IPNDMScheduler, {}, "'IPNDMScheduler' is no scheduler that networks can"),
    "cosxl": (
        lambda: diffusers.EDMEulerScheduler(sigma_max=120.0, prediction_type="v_prediction"),
        {},
        "prediction_type must be epsilon for EDMEulerScheduler, got 'v_prediction'",
    ),
    "other levels": (lambda: diffusers.EDMEulerScheduler(sigma_max=120.0), {}, "sigma_max must be 80.0 .* got 120.0"),
    "continuous": (
        lambda: diffusers.EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction"),
        {},
        "timestep_type must be discrete, got 'continuous'",
    ),
    "flow of eps": (
        lambda: diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="epsilon"),
        {},
        "prediction_type must be flow_prediction for DPMSolverMultistepScheduler",
    ),
    "inverted": (lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), {}, "invert_sigmas must be f"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused(name: str, tmp_path: Path) -> None:
    make, changed, message = UNSUPPORTED[name]
    folder = folder_of(make(), tmp_path, **changed)
    with pytest.raises(ConfigurationError, match=message) as caught:
        LatentDiffusion(DiffusersModelConfig(str(folder), subfolder="unet"))
    assert f"{folder}/scheduler/scheduler_config.json" in str(caught.value)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    spec = DiffusersModelConfig(str(tmp_path), subfolder="unet")
    assert read_meaning(str(tmp_path), "unet") is None
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ConfigurationError, match=r"is a pipeline without scheduler/scheduler_config\.json"):
        LatentDiffusion(spec)
    folder_of(SCHEDULERS["sdxl"][0](), tmp_path)
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"model_index\.json contains no JSON object"):
        LatentDiffusion(spec)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"model_index\.json cannot be read"):
        LatentDiffusion(spec)

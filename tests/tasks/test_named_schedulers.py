"""A sampler that is named by its class of diffusers draws the latents of the pipeline with that scheduler."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from lit_efficient import ConfigurationError, DiffusersModelConfig, DiTConfig, LatentDiffusion, Samples
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from tests import tiny_pipelines
from tests.tasks.test_pipeline_predictions import CAPTION, called

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")
STEPS = 7
TABLE = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
ZERO_SNR = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "LCMScheduler",
    "TCDScheduler",
)
FLOW = (
    "DPMSolverMultistepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "UniPCMultistepScheduler",
)
BY_RESOLUTION = (
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "UniPCMultistepScheduler",
)
CASES = [
    *(("sd15", name, {}) for name in TABLE),
    *(("sd2", name, {}) for name in ZERO_SNR),
    *(("sdxl", name, {}) for name in TABLE if name != "PNDMScheduler"),
    *(("sd3", name, {}) for name in FLOW),
    *(("flux", name, {}) for name in BY_RESOLUTION),
    ("sd15", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"}),
    ("sd15", "EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ("sd15", "EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    ("sd15", "DDIMScheduler", {"set_alpha_to_one": False}),
]


class Pixels(torch.nn.Module):
    """An autoencoder that leaves images as they are."""

    image_channels = 3
    latent_channels = 3
    factor = 1


def check_latents(family: str, name: str, options: dict[str, Any], folder: Path) -> None:
    written = tiny_pipelines.written(family, folder)
    pipeline: Any = type(written).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    sampler = Sampler(name, options=options or None)
    module = LatentDiffusion(
        DiffusersModelConfig(str(folder)), sampler=sampler, sampling_steps=STEPS, samples=Samples(0)
    )
    module.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
    module.configure_model()
    module.eval()
    fields = {"clip_sample": False, **pipeline.scheduler.config, **options}
    if module.process.schedule == "flow" and not name.startswith("FlowMatch"):
        shift = module.sampler_at((8, 8)).shift
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
        # Flux's pipeline passes the logarithm of its shift, which DPM-Solver refuses without this field.
        fields |= flow | {"use_dynamic_shifting": family == "flux" and name.startswith("DPMSolver")}
    pipeline.scheduler = getattr(diffusers, name).from_config(fields)
    theirs = called(pipeline, 5.0, "Blurry", STEPS, "latent")
    if theirs.ndim == 3:
        theirs = pipeline._unpack_latents(theirs, 64, 64, 8)
    generator = torch.Generator().manual_seed(1)
    asked: dict[str, Any] = {"captions": [CAPTION], "negative": "Blurry", "guidance_scale": 5.0, "size": (8, 8)}
    ours = module.sample(generator=generator, **asked)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.abs().max())))
    # The sampler of a checkpoint has the options of the folder, which may be gone.
    again = LatentDiffusion(module.backbone, sampler=asdict(module.sampler), samples=Samples(0))
    assert again.sampler == module.sampler


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("sd15", "UniPCMultistepScheduler"),
        ("sd15", "EulerAncestralDiscreteScheduler"),
        ("sd2", "DPMSolverMultistepScheduler"),
        ("sd3", "FlowMatchHeunDiscreteScheduler"),
        ("flux", "FlowMatchEulerDiscreteScheduler"),
        ("flux", "DPMSolverMultistepScheduler"),
    ],
)
def test_latents_are_those_of_the_pipeline_with_this_scheduler(family: str, name: str, tmp_path: Path) -> None:
    check_latents(family, name, {}, tmp_path)


@pytest.mark.turns(8)
@pytest.mark.parametrize(("family", "name", "options"), CASES, ids=lambda value: str(value)[:60])
def test_any_scheduler_and_options(family: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_latents(family, name, options, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": "UniPCScheduler"}, "name must be builtin, ddim, euler, heun, dpmsolver.. or a scheduler class"),
        ({"sampler": "unipc"}, "name must be one of builtin, ddim, euler, heun, dpmsolver"),
        ({"sampler": "DDIMScheduler"}, "'DDIMScheduler' cannot sample a network that was trained on 'flow'"),
        ({"sampler": "EulerDiscreteScheduler", "schedule": "flow"}, "it does not support flow matching"),
        (
            {
                "sampler": "PNDMScheduler",
                "schedule": DiffusionProcess("linear", zero_terminal_snr=True),
                "prediction": "v",
            },
            "does not take the table of betas of the training",
        ),
        (
            {"sampler": "DDIMInverseScheduler", "schedule": "linear", "prediction": "v"},
            "20 steps with exact predictions do not end at the data",
        ),
        (
            {"sampler": "RePaintScheduler", "schedule": "linear", "prediction": "eps"},
            "20 steps fail: RePaintScheduler.step.. missing 2 required positional arguments",
        ),
        (
            {"sampler": Sampler("DDIMScheduler", options={"karras": True}), "schedule": "linear", "prediction": "v"},
            "options must be arguments of DDIMScheduler",
        ),
        (
            {"sampler": Sampler("DDIMScheduler", options={"beta_end": 0.1}), "schedule": "linear", "prediction": "v"},
            "options.beta_end must be left out, because the training decides it, got 0.1",
        ),
        (
            {
                "sampler": Sampler("DDIMScheduler", options={"thresholding": "no"}),
                "schedule": "linear",
                "prediction": "v",
            },
            "options.thresholding must be true or false, got 'no'",
        ),
        (
            {
                "sampler": Sampler("DDIMScheduler", options={"steps_offset": "1"}),
                "schedule": "linear",
                "prediction": "v",
            },
            "options.steps_offset must be a number, got '1'",
        ),
        (
            {"sampler": Sampler("FlowMatchEulerDiscreteScheduler", options={"use_dynamic_shifting": "no"})},
            "options.use_dynamic_shifting must be true or false, got 'no'",
        ),
    ],
)
def test_what_cannot_sample_is_refused_before_training(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LatentDiffusion(DiTConfig(num_classes=3), **arguments)


@pytest.mark.parametrize(
    ("name", "schedule", "prediction"),
    [
        ("UniPCMultistepScheduler", "flow", "flow"),
        ("UniPCMultistepScheduler", "scaled_linear", "x0"),
        ("EulerDiscreteScheduler", "cosine", "v"),
        ("DPMSolverMultistepScheduler", "squared_cosine", "flow"),
        ("EDMDPMSolverMultistepScheduler", "edm", "x0"),
        ("EDMEulerScheduler", "edm", "edm"),
    ],
)
def test_a_network_from_scratch_is_sampled_and_each_image_has_its_own_noise(
    name: str, schedule: Any, prediction: Any
) -> None:
    torch.manual_seed(0)
    shape = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=1, heads=2, num_classes=3)
    module = LatentDiffusion(
        shape, prediction, schedule, sampler=name, sampling_steps=5, guidance_scale=1.5, samples=Samples(0)
    )
    module.configure_model()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    module.eval()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    both = module.sample(torch.tensor([0, 2]), generators)
    alone = module.sample(torch.tensor([2]), torch.Generator().manual_seed(4))
    assert both.isfinite().all()
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDIMScheduler", {"thresholding": True, "dynamic_thresholding_ratio": 0.9, "sample_max_value": 1.5}),
        ("DPMSolverMultistepScheduler", {"thresholding": True}),
        ("DDPMScheduler", {"clip_sample": True}),
    ],
)
def test_pixels_are_thresholded_as_in_diffusers(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"schedule": "linear", "prediction": "eps", "sampling_steps": STEPS, "guidance_scale": 1.0}
    backbone = DiTConfig(channels=3, size=8, width=16, depth=1, heads=2, num_classes=3)
    module = LatentDiffusion(backbone, sampler=Sampler(name, options=options), samples=Samples(0), **given)
    module.configure_model()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.codec = LatentCodec(Pixels(), torch.zeros(3), torch.ones(3))
    labels = torch.arange(3)
    ours = module.eval().sample(labels, torch.Generator().manual_seed(1))

    def drawn(**fields: Any) -> Tensor:
        betas = {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
        known = {"clip_sample": False, "timestep_spacing": "trailing", **betas, **fields}
        taken = inspect.signature(getattr(diffusers, name).__init__).parameters
        scheduler = getattr(diffusers, name)(**{key: value for key, value in known.items() if key in taken})
        scheduler.set_timesteps(STEPS)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn((3, 3, 8, 8), generator=generator)
        draws = {"generator": generator} if name != "DPMSolverMultistepScheduler" else {}
        for timestep in scheduler.timesteps:
            with torch.no_grad():
                predicted = module.network(x, timestep.expand(3) / 1000, labels)
            x = scheduler.step(predicted, timestep, x, return_dict=False, **draws)[0]
        return x

    torch.testing.assert_close(ours, drawn(**options), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, drawn(), atol=1e-2)
    module.codec = LatentCodec(Pixels(), torch.zeros(3), torch.full((3,), 0.5))
    with pytest.raises(ConfigurationError, match=r"sampler.options must be without thresholding and clip_sample"):
        module.sample(labels)

"""What a trained latent diffusion run gives to a pipeline of diffusers, and the scheduler that the pipeline walks by.

Only those schedulers are taken that a pipeline drives rightly: ``DiTPipeline`` does not scale its first noise, as
schedulers in sigma need it, and most pipelines call ``scale_model_input``, which the flow schedulers do not have. Flow
is left with DPM-Solver++ there, which cuts timesteps to integers: the network is told a time up to 1/1000 too early.
"""

from dataclasses import dataclass
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusers_sampling import check_steps, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess

EVERY: tuple[SamplerName, ...] = ("ddim", "euler", "heun", "dpmsolver++")


@dataclass(frozen=True)
class Parts:
    """What a trained run has to offer.

    Args:
        network: A model of diffusers, in evaluation mode.
        vae: Likewise; its latents are normalised as the network knows them.
        text_encoder: A ``TextEncoder``; None without text.
        process: Of the training.
        prediction: What the network predicts.
        sampler: Of the run.
        guidance_scale: Likewise.
        steps: Likewise.
    """

    network: Any
    vae: Any
    text_encoder: Any
    process: DiffusionProcess
    prediction: Any
    sampler: Sampler
    guidance_scale: float
    steps: int


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers, and how it is called to sample as the run did."""

    pipeline: Any
    call: str


def call_of(parts: Parts, condition: str, *further: str) -> str:
    """Arguments that make a pipeline sample as the run did; empty ones are left out."""
    settings = f"guidance_scale={parts.guidance_scale}, num_inference_steps={parts.steps}"
    return ", ".join(part for part in (condition, settings, *further) if part)


def scheduler_of(
    parts: Parts, allowed: tuple[SamplerName, ...], of_flow: tuple[SamplerName, ...] = ("dpmsolver++",)
) -> Any:
    """The scheduler of the run's sampler where the pipeline can drive it, else of DDIM.

    Args:
        parts: The run.
        allowed: Samplers that the pipeline drives.
        of_flow: Likewise for flow, where the first one takes the place of others.

    Raises:
        ConfigurationError: If there is none for what the network predicts.
    """
    process, name = parts.process, parts.sampler.name
    if process.schedule == "flow":
        name = name if name in of_flow else of_flow[0]
    elif name not in allowed:  # the built-in sampler is DDIM, as Euler's steps in sigma are
        name = "ddim"
    shift = parts.sampler.shift if process.schedule == "flow" else 1.0
    try:
        check_steps(process, Sampler(name, shift=shift), parts.steps)
        scheduler = scheduler_for(process, name, parts.prediction, shift)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"export: no scheduler of diffusers samples from this network in a pipeline: {error}"
        ) from error
    if "steps_offset" in scheduler.config:  # trailing timesteps have none, and a pipeline warns of any other number
        scheduler.register_to_config(steps_offset=1)
    return scheduler

"""Components of a trained latent diffusion run for a pipeline of diffusers, and the pipeline's scheduler.

A scheduler is used only if the pipeline calls it correctly. ``DiTPipeline`` does not scale its first noise, which
schedulers in sigma need. Most pipelines call ``scale_model_input``, which the flow schedulers lack; for flow they get
DPM-Solver++, which rounds timesteps down to integers, so that the network sees a time up to 1/1000 too early.
"""

from dataclasses import dataclass, replace
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusers_sampling import check_steps, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.losses.timesteps import shift_at

EVERY: tuple[str, ...] = ("ddim", "euler", "heun", "dpmsolver++", "lcm")


@dataclass(frozen=True)
class Parts:
    """Components and settings of a trained run."""

    network: Any  # a model of diffusers, in evaluation mode
    vae: Any  # an autoencoder of diffusers, with the normalisation of latents folded in
    text_encoder: Any  # a ``TextEncoder``; None without text
    process: DiffusionProcess  # noise process of the training
    prediction: Any  # target that the network predicts
    sampler: Sampler  # of the run, like the next two
    guidance_scale: float
    steps: int
    size: tuple[int, int] | None = None  # height and width of the trained latents, if any were trained on


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers and the call that samples like the run."""

    pipeline: Any
    call: str  # arguments, as Python
    notes: tuple[str, ...] = ()  # remaining differences from the run, for people
    folded: tuple[str, ...] = ()  # names of weights that were changed so that the pipeline samples the same


def call_of(parts: Parts, condition: str, *further: str) -> str:
    """Return the arguments with which a pipeline samples like the run; empty strings are left out."""
    settings = f"guidance_scale={parts.guidance_scale}, num_inference_steps={parts.steps}"
    return ", ".join(part for part in (condition, settings, *further) if part)


def size_of(parts: Parts, factor: int) -> str:
    """Return the arguments for latents of the run's size; "" if that is the network's ``sample_size``.

    Args:
        parts: The trained run.
        factor: Pixels per latent and side, as in the pipeline.
    """
    if parts.size is None or parts.size == (parts.network.config.sample_size,) * 2:
        return ""
    return f"height={factor * parts.size[0]}, width={factor * parts.size[1]}"


def refuse_rescale(parts: Parts, pipeline: str) -> None:
    """Raise ConfigurationError if the run rescaled its guidance, which this pipeline cannot do."""
    if parts.sampler.guidance_rescale and parts.guidance_scale != 1.0:
        raise ConfigurationError(
            f"export: {pipeline} cannot rescale its guidance, and the run sampled with Sampler("
            f"guidance_rescale={parts.sampler.guidance_rescale}): the pipeline's images would have another contrast. "
            "Sample with guidance_rescale=0"
        )


def scheduler_of(parts: Parts, allowed: tuple[str, ...], of_flow: tuple[str, ...] = ("dpmsolver++",)) -> Any:
    """Return the scheduler of the run's sampler if the pipeline supports it, else a replacement.

    Args:
        parts: The trained run.
        allowed: Samplers that the pipeline supports; the replacement is DDIM.
        of_flow: Samplers that it supports for flow; the replacement is the first one.

    Raises:
        ConfigurationError: If diffusers has no scheduler for the network's prediction target.
    """
    process = parts.process
    shift = shift_at(parts.sampler.shift)
    if shift != 1.0 and process.schedule != "flow":
        raise ConfigurationError(
            f"export: diffusers' schedulers of {process.schedule!r} have no shift, and the run sampled with Sampler("
            f"shift={shift}): sample with shift=1"
        )
    supported = of_flow if process.schedule == "flow" else allowed
    sampler = replace(parts.sampler, shift=shift)
    if sampler.name == "lcm" and sampler.name not in supported:
        raise ConfigurationError(
            "export: the pipeline has no scheduler for a network that was distilled for the sampler lcm on "
            f"{process.schedule!r}: use format safetensors for the weights alone"
        )
    if not (sampler.name in supported or (sampler.names_class and "euler" in supported)):
        # The built-in sampler equals DDIM.
        sampler = Sampler(of_flow[0] if process.schedule == "flow" else "ddim", shift=shift)
    try:
        check_steps(process, sampler, parts.steps, parts.prediction)
        scheduler = scheduler_for(process, sampler, parts.prediction, shift)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"export: no scheduler of diffusers samples from this network in a pipeline: {error}"
        ) from error
    if "steps_offset" in scheduler.config:  # unused with trailing timesteps, but pipelines warn of other values
        scheduler.register_to_config(steps_offset=1)
    return scheduler


def notes_of(parts: Parts, pipeline: Any) -> tuple[str, ...]:
    """Return remarks on differences between a pipeline and the run."""
    name = parts.sampler.name
    sampler = replace(parts.sampler, name="ddim") if name == "builtin" else parts.sampler
    own = scheduler_for(parts.process, sampler)  # for flow and EDM, ddim has Euler steps
    wanted = type(own).__name__
    taken = type(pipeline.scheduler).__name__
    if wanted == taken:
        return ()
    return (
        f"the run's sampler {name!r} ({wanted}) is replaced by {taken}, because {type(pipeline).__name__} does not "
        "support it: the same noise gives other images, and the difference grows with fewer steps",
    )

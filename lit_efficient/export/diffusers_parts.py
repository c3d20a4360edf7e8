"""What a trained latent diffusion run gives to a pipeline of diffusers, and the scheduler that the pipeline walks by.

Only those schedulers are taken that a pipeline drives rightly: ``DiTPipeline`` does not scale its first noise, as
schedulers in sigma need it, and most pipelines call ``scale_model_input``, which the flow schedulers do not have. Flow
is left with DPM-Solver++ there, which cuts timesteps to integers: the network gets a time up to 1/1000 too early.
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
    """What a trained run has to offer."""

    network: Any  # a model of diffusers, in evaluation mode
    vae: Any  # one, too; its latents are normalised as the network knows them
    text_encoder: Any  # a ``TextEncoder``; None without text
    process: DiffusionProcess  # of the training
    prediction: Any  # what the network predicts
    sampler: Sampler  # of the run
    guidance_scale: float  # of the run
    steps: int  # of the run
    size: tuple[int, int] | None = None  # height and width of the latents that it trained on, if it trained


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers, how it is called to sample as the run did, and what it does otherwise all the same."""

    pipeline: Any
    call: str
    notes: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()  # weights of the network that were changed to sample the same


def call_of(parts: Parts, condition: str, *further: str) -> str:
    """Arguments that make a pipeline sample as the run did; empty ones are left out."""
    settings = f"guidance_scale={parts.guidance_scale}, num_inference_steps={parts.steps}"
    return ", ".join(part for part in (condition, settings, *further) if part)


def size_of(parts: Parts, factor: int) -> str:
    """Arguments that make a pipeline draw latents of the run's size where it is not the network's ``sample_size``.

    ``factor``: pixels of a latent's side, as the pipeline has it.
    """
    if parts.size is None or parts.size == (parts.network.config.sample_size,) * 2:
        return ""
    return f"height={factor * parts.size[0]}, width={factor * parts.size[1]}"


def refuse_rescale(parts: Parts, pipeline: str) -> None:
    """Refuse a run that rescaled its guidance, for a pipeline that cannot."""
    if parts.sampler.guidance_rescale and parts.guidance_scale != 1.0:
        raise ConfigurationError(
            f"export: {pipeline} cannot rescale its guidance, as the run did with Sampler("
            f"guidance_rescale={parts.sampler.guidance_rescale}): its images would have another contrast. Sample with "
            "guidance_rescale=0"
        )


def scheduler_of(
    parts: Parts, allowed: tuple[SamplerName, ...], of_flow: tuple[SamplerName, ...] = ("dpmsolver++",)
) -> Any:
    """The scheduler of the run's sampler where the pipeline can drive it, else of DDIM; for flow the first one
    ``of_flow``.

    Raises:
        ConfigurationError: If there is none for what the network predicts.
    """
    process, name = parts.process, parts.sampler.name
    if parts.sampler.shift != 1.0 and process.schedule != "flow":
        raise ConfigurationError(
            f"export: diffusers' schedulers of {process.schedule!r} have no shift, and the run sampled with Sampler("
            f"shift={parts.sampler.shift}): sample with shift=1"
        )
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


def notes_of(parts: Parts, pipeline: Any) -> tuple[str, ...]:
    """What a pipeline does in another way than the run did."""
    name = parts.sampler.name
    own = scheduler_for(parts.process, "ddim" if name == "builtin" else name)  # of flow and EDM these are Euler's steps
    wanted, taken = type(own).__name__, type(pipeline.scheduler).__name__
    if wanted == taken:
        return ()
    return (
        f"the run's sampler {name!r} ({wanted}) is replaced by {taken}, as {type(pipeline).__name__} cannot drive it: "
        "from the same noise its images are others, the more so the fewer the steps",
    )

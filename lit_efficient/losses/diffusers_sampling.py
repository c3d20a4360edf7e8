"""Schedulers of diffusers, built from a diffusion process, for sampling here and in exported pipelines.

    process     ddim            euler                     heun                   dpmsolver++, lcm
    tables      DDIM            EulerDiscrete             HeunDiscrete (*)       DPMSolverMultistep
    cosine      DDIM            EulerDiscrete             -                      DPMSolverMultistep
    flow        = euler         FlowMatchEulerDiscrete    FlowMatchHeunDiscrete  DPMSolverMultistep (flow sigmas)
    edm         = euler         EDMEuler                  -                      EDMDPMSolverMultistep

(*) linear and scaled_linear. Heun's step in sigma does not work from pure noise, where sigma is thousands or infinite:
the second slope is evaluated at a much smaller sigma, and the mean of both slopes over such a long step is far off.

Timesteps are always trailing: sampling starts at the last training time. The defaults of these classes start earlier
and would skip the last step of a zero terminal SNR schedule. Samples are not clipped, because latents have no fixed
range.

Costs: one network evaluation a step, two for heun, twice as many with guidance.
Source: DPM-Solver++: Lu et al. (2022), https://arxiv.org/abs/2211.01095; trailing: https://arxiv.org/abs/2305.08891.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, install_line, refusal
from lit_efficient.losses.consistency import GRID
from lit_efficient.losses.diffusion import Prediction, convert
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.named_schedulers import (
    PREDICTION_TYPES,
    Generators,
    betas_of,
    check_named,
    named_scheduler,
    quietly,
    sample_with_named,
    scheduler_class,
)
from lit_efficient.losses.noise_process import (
    RHO,
    SIGMA_MAX,
    SIGMA_MIN,
    STEPS,
    DiffusionProcess,
    Schedule,
    as_process,
    karras_time,
)
from lit_efficient.losses.timesteps import shift_at

_VP = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
    "lcm": "LCMScheduler",
}
_FLOW = {
    "ddim": "FlowMatchEulerDiscreteScheduler",
    "euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "FlowMatchHeunDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
}
_EDM = {"ddim": "EDMEulerScheduler", "euler": "EDMEulerScheduler", "dpmsolver++": "EDMDPMSolverMultistepScheduler"}


def native_prediction(process: DiffusionProcess) -> Prediction:
    """Return the target that samplers of a process use: it determines data and noise at both ends."""
    if process.schedule == "flow":
        return "flow"
    return "edm" if process.schedule == "edm" else "v"


def scheduler_for(
    process: Schedule | DiffusionProcess,
    sampler: str | Sampler,
    prediction: Prediction | None = None,
    shift: float = 1.0,
) -> Any:
    """Return a scheduler of diffusers for networks that were trained on ``process``.

    Args:
        process: The process.
        sampler: ddim, euler, heun, dpmsolver++, lcm (not for flow) or the name of a scheduler class, or a whole
            `Sampler`.
        prediction: Target of the outputs that its ``step`` receives. ``None`` takes :func:`native_prediction`. For an
            exported pipeline it must be the target that the network predicts.
        shift: Shift of the sampling times, for flow only.

    Raises:
        ConfigurationError: If diffusers is not installed, or has no scheduler for the combination.
    """
    process = as_process(process)
    if prediction is None:
        prediction = native_prediction(process)
    if isinstance(sampler, str):
        sampler = Sampler(sampler)
    sampler = replace(sampler, shift=shift)
    check_sampler(process, sampler, prediction)
    if sampler.names_class:
        return named_scheduler(process, sampler, prediction)
    native = native_prediction(process)
    if (process.schedule in ("flow", "edm") and prediction != native) or prediction not in (native, *PREDICTION_TYPES):
        raise ConfigurationError(
            f"scheduler_for: diffusers' schedulers of {process.schedule!r} do not support prediction {prediction!r}; "
            f"train with {native!r}, or convert the output and leave prediction unset"
        )
    with quietly():
        return _build(process, sampler.name, prediction, shift)


def _build(process: DiffusionProcess, sampler: str, prediction: Prediction, shift: float) -> Any:
    schedulers = _diffusers(sampler)
    if sampler == "lcm" and process.schedule == "flow":
        # FlowMatchLCMScheduler has other times.
        raise ConfigurationError("scheduler_for: diffusers' pipelines have no scheduler of lcm for flow with its times")
    if process.schedule == "flow":
        options: dict[str, object] = {"shift": shift}
        if sampler == "dpmsolver++":
            options = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
        return getattr(schedulers, _FLOW[sampler])(num_train_timesteps=STEPS, **options)
    if process.schedule == "edm":
        return getattr(schedulers, _EDM[sampler])(
            sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, sigma_data=process.sigma_data, rho=RHO
        )
    options = {"timestep_spacing": "trailing", "prediction_type": PREDICTION_TYPES[prediction]}
    if sampler == "ddim":
        options |= {"clip_sample": False}
    if sampler != "heun":
        # Without this flag, solvers in sigma divide by the zero alpha at the end of these schedules.
        options |= {"rescale_betas_zero_snr": process.zero_terminal_snr or process.schedule == "cosine"}
    return getattr(schedulers, _VP[sampler])(num_train_timesteps=STEPS, **betas_of(process), **options)


def check_sampler(process: DiffusionProcess, sampler: Sampler, prediction: Prediction) -> None:
    """Raise ConfigurationError unless the sampler supports networks with this process and target."""
    name = sampler.name
    schedule = process.schedule
    if name == "builtin":
        return
    if sampler.names_class:
        scheduler_class(name)
    elif name != "lcm":
        _diffusers(name)
    elif schedule == "edm":
        raise refusal("Sampler", "name", "builtin, ddim, euler or dpmsolver++ on 'edm', without lcm", name)
    if sampler.shift not in (None, 1.0) and schedule != "flow":
        allowed = f"1 for diffusers' {name} on {schedule!r} (they shift flow only; name=builtin shifts every process)"
        raise refusal("Sampler", "shift", allowed, sampler.shift)
    if name == "lcm" and sampler.shift not in (None, 1.0):
        raise refusal("Sampler", "shift", "1 for lcm, whose times are those of its distillation", sampler.shift)
    if prediction == "eps" and process.ends_in_noise:
        reason = "diffusers' samplers start at pure noise, where eps does not determine the data"
        allowed = f"builtin for prediction 'eps' on {schedule!r} ({reason}; or train v)"
        raise refusal("Sampler", "name", allowed, name)
    if name == "heun" and (schedule == "edm" or (schedule != "flow" and process.ends_in_noise)):
        place = repr(schedule)
        if process.zero_terminal_snr:
            place += " with zero_terminal_snr"
        allowed = f"builtin, ddim, euler or dpmsolver++ on {place} (diffusers' heun cannot start from that noise)"
        raise refusal("Sampler", "name", allowed, name)


def check_steps(process: DiffusionProcess, sampler: Sampler, steps: int, prediction: Prediction) -> None:
    """Raise ConfigurationError for a number of steps that the sampler does not support."""
    if sampler.names_class:
        check_named(process, sampler, prediction, steps)
        return
    if sampler.name == "lcm":
        check_number("Sampler", "sampling_steps", steps, least=1, most=GRID, whole=True)
    if sampler.name == "builtin" or process.schedule in ("flow", "edm"):
        return
    if not 1 <= steps <= STEPS or (sampler.name == "ddim" and STEPS % steps):
        # DDIMScheduler always steps by 1000 // steps timesteps. With 400 steps the standard deviation of samples of a
        # Gaussian was 26 % off.
        if sampler.name == "ddim":
            allowed = f"a divisor of {STEPS}"
        else:
            allowed = f"1 to {STEPS}"
        raise refusal("Sampler", "sampling_steps", f"{allowed} for diffusers' {sampler.name}", steps)


def sample_with_diffusers(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    process: Schedule | DiffusionProcess,
    prediction: Prediction,
    sampler: Sampler,
    generator: Generators = None,
) -> Tensor:
    """Integrate from noise to data with a scheduler of diffusers, and return the data [B, ...] in float32.

    Args:
        predict: Network: noisy data [B, ...] and times [B] in [0, 1] to a prediction [B, ...].
        noise: Standard normal noise, [B, ...]. It is converted to float32.
        steps: Number of steps, at most 1000. For ddim a divisor of 1000.
        process: Process that the network was trained on.
        prediction: Target that the network predicts. It is converted to that of the scheduler.
        sampler: Sampler with a name other than builtin. For a `ResolutionShift`, each position of the noise is
            a token.
        generator: Generator of schedulers that draw noise in each step, or one for each sample.

    Raises:
        ConfigurationError: If the sampler does not support the process, the target or the number of steps.
    """
    process = as_process(process)
    check_sampler(process, sampler, prediction)
    if sampler.names_class:
        sampler = replace(sampler, shift=shift_at(sampler.shift, noise[0, 0].numel()))
        return sample_with_named(predict, noise, steps, process, prediction, sampler, generator)
    check_steps(process, sampler, steps, prediction)
    native = native_prediction(process)
    scheduler = scheduler_for(process, sampler.name, shift=shift_at(sampler.shift, noise[0, 0].numel()))
    _set_timesteps(scheduler, steps)
    x = noise.float() * float(getattr(scheduler, "init_noise_sigma", 1.0))
    for timestep, t in zip(scheduler.timesteps, _times(scheduler, process), strict=True):
        state = x
        if process.schedule != "flow":
            scaled = scheduler.scale_model_input(x, timestep)  # also needed for edm: it sets the scheduler's counter
            if process.schedule != "edm":  # `predict` scales the input of EDM itself
                state = scaled
        times = t.to(x.device).expand(len(x))
        output = convert(predict(state, times).float(), state, times, process, prediction, native)
        x = scheduler.step(output, timestep, x, return_dict=False)[0]
    return x


def _set_timesteps(scheduler: Any, steps: int) -> None:
    if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":
        # By default this scheduler ends at 1/1000 and shifts that time twice. Evenly spaced times avoid both.
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1.0 / steps, steps).tolist())
        return
    with quietly():
        scheduler.set_timesteps(steps)
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and bool((sigmas.diff() > 0).any()):
        # The scheduler replaces the infinite first level by 4096. With many steps the second level is higher.
        reason = f"so that the first noise level of diffusers' {type(scheduler).__name__} is above the second"
        raise refusal("Sampler", "sampling_steps", f"smaller ({reason})", steps)


def _times(scheduler: Any, process: DiffusionProcess) -> Tensor:
    """Convert the timesteps of a scheduler to times in [0, 1], [evaluations] float32."""
    timesteps = scheduler.timesteps
    if process.schedule == "edm":
        return karras_time(scheduler.sigmas[: len(timesteps)].float())
    if process.schedule != "flow":
        return (timesteps.float() + 1.0) / STEPS
    if type(scheduler).__name__ == "DPMSolverMultistepScheduler":  # its timesteps are rounded down
        return scheduler.sigmas[: len(timesteps)].float()
    return timesteps.float() / STEPS


def _diffusers(name: str) -> object:
    try:
        from diffusers import schedulers
    except ImportError as error:
        allowed = f"builtin without diffusers, which provides the others: {install_line('diffusers')}"
        raise refusal("Sampler", "name", allowed, name) from error
    return schedulers

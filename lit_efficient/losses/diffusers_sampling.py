"""diffusers' schedulers, built from the description of the process, for sampling here and in pipelines elsewhere.

    process     ddim            euler                     heun                   dpmsolver++
    tables      DDIM            EulerDiscrete             HeunDiscrete (*)       DPMSolverMultistep
    cosine      DDIM            EulerDiscrete             -                      DPMSolverMultistep
    flow        = euler         FlowMatchEulerDiscrete    FlowMatchHeunDiscrete  DPMSolverMultistep (flow sigmas)
    edm         = euler         EDMEuler                  -                      EDMDPMSolverMultistep

(*) linear and scaled_linear. From pure noise, sigma of thousands or infinity, Heun's step in sigma does not work: its
second slope belongs to a sigma so much smaller that their mean, times the length of the step, throws samples far away.

Timesteps are always trailing: sampling starts at the last training time. (The defaults of these classes start earlier,
which throws a zero terminal SNR away.) Samples are never clipped: latents have no range.

Costs: one network evaluation a step, two for heun, twice as many with guidance.
Source: DPM-Solver++: Lu et al. (2022), https://arxiv.org/abs/2211.01095; trailing: https://arxiv.org/abs/2305.08891.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, install_line, refusal
from lit_efficient.losses.diffusion import Prediction, convert
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import (
    RHO,
    SIGMA_MAX,
    SIGMA_MIN,
    STEPS,
    TABLES,
    DiffusionProcess,
    Schedule,
    alphas_cumprod,
    as_process,
    karras_time,
)

_VP = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
}
_FLOW = {
    "ddim": "FlowMatchEulerDiscreteScheduler",
    "euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "FlowMatchHeunDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
}
_EDM = {"ddim": "EDMEulerScheduler", "euler": "EDMEulerScheduler", "dpmsolver++": "EDMDPMSolverMultistepScheduler"}
_PREDICTION_TYPES = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}
_BETA_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squared_cosine": "squaredcos_cap_v2"}


def native_prediction(process: DiffusionProcess) -> Prediction:
    """The target that a process's samplers take best: it determines data and noise at both ends."""
    return {"flow": "flow", "edm": "edm"}.get(process.schedule, "v")  # type: ignore[return-value]


def scheduler_for(
    process: Schedule | DiffusionProcess, sampler: SamplerName, prediction: Prediction | None = None, shift: float = 1.0
) -> Any:
    """A scheduler of diffusers that samples from what was trained on ``process``.

    Args:
        process: The process.
        sampler: ddim, euler, heun or dpmsolver++.
        prediction: What the outputs given to its ``step`` are; None for the process's native target: flow for flow,
            edm for edm, else v. A pipeline's scheduler must hold what its network predicts.
        shift: Of the sampling times, for flow.

    Raises:
        ConfigurationError: If diffusers is not installed, or has no scheduler for the combination.
    """
    process = as_process(process)
    prediction = native_prediction(process) if prediction is None else prediction
    check_sampler(process, Sampler(sampler, shift=shift), prediction)
    native = native_prediction(process)
    if (process.schedule in ("flow", "edm") and prediction != native) or prediction not in (native, *_PREDICTION_TYPES):
        raise ConfigurationError(
            f"scheduler_for: diffusers' schedulers of {process.schedule!r} cannot hold prediction {prediction!r}; "
            f"train with {native!r}, or convert the output and leave prediction unset."
        )
    with _quiet():
        return _build(process, sampler, prediction, shift)


def _build(process: DiffusionProcess, sampler: SamplerName, prediction: Prediction, shift: float) -> Any:
    schedulers = _diffusers(sampler)
    if process.schedule == "flow":
        options: dict[str, Any] = {"shift": shift}
        if sampler == "dpmsolver++":
            options = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
        return getattr(schedulers, _FLOW[sampler])(num_train_timesteps=STEPS, **options)
    if process.schedule == "edm":
        return getattr(schedulers, _EDM[sampler])(
            sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, sigma_data=process.sigma_data, rho=RHO
        )
    options = {"timestep_spacing": "trailing", "prediction_type": _PREDICTION_TYPES[prediction]}
    if sampler == "ddim":
        options |= {"clip_sample": False}
    if sampler != "heun":
        # Without the flag the solvers in sigma divide by the zero at the end; a schedule that ends there stays itself.
        options |= {"rescale_betas_zero_snr": process.zero_terminal_snr or process.schedule == "cosine"}
    return getattr(schedulers, _VP[sampler])(num_train_timesteps=STEPS, **_betas(process), **options)


def check_sampler(process: DiffusionProcess, sampler: Sampler, prediction: Prediction) -> None:
    """Raise ConfigurationError unless the sampler can draw from a network of this process and target."""
    name, schedule = sampler.name, process.schedule
    if name == "builtin":
        return
    _diffusers(name)
    if sampler.shift != 1.0 and schedule != "flow":
        allowed = f"1 for diffusers' {name} on {schedule!r} (flow alone has one; name=builtin shifts every process)"
        raise refusal("Sampler", "shift", allowed, sampler.shift)
    if prediction == "eps" and process.ends_in_noise:
        reason = "diffusers' samplers start where there is no signal, and eps does not say there what the data is"
        allowed = f"builtin for prediction 'eps' on {schedule!r} ({reason}; or train v)"
        raise refusal("Sampler", "name", allowed, name)
    if name == "heun" and (schedule == "edm" or (schedule != "flow" and process.ends_in_noise)):
        place = f"{schedule!r}{' with zero_terminal_snr' if process.zero_terminal_snr else ''}"
        allowed = f"builtin, ddim, euler or dpmsolver++ on {place} (diffusers' heun cannot start from that noise)"
        raise refusal("Sampler", "name", allowed, name)


def check_steps(process: DiffusionProcess, sampler: Sampler, steps: int) -> None:
    """Raise ConfigurationError for a number of steps with which the sampler would go wrong."""
    if sampler.name == "builtin" or process.schedule in ("flow", "edm"):
        return
    if not 1 <= steps <= STEPS or (sampler.name == "ddim" and STEPS % steps):
        # It steps by 1000 // steps timesteps, whatever the next one is: at 400 the spread of a Gaussian was 26 % off.
        allowed = f"a divisor of {STEPS}" if sampler.name == "ddim" else f"1 to {STEPS}"
        raise refusal("Sampler", "sampling_steps", f"{allowed} for diffusers' {sampler.name}", steps)


def sample_with_diffusers(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    process: Schedule | DiffusionProcess,
    prediction: Prediction,
    sampler: Sampler,
) -> Tensor:
    """Integrate from noise to data, [B, ...] float32, with a scheduler of diffusers.

    Args:
        predict: The network: noisy data [B, ...] and our times [B] to a prediction [B, ...].
        noise: Standard normal, [B, ...]; computed with in float32.
        steps: Steps, at most 1000; for ddim a divisor of 1000.
        process: The process that the network was trained on.
        prediction: What it predicts; any target, it is converted to the scheduler's.
        sampler: Which scheduler; not builtin.
    """
    process = as_process(process)
    check_sampler(process, sampler, prediction)
    check_steps(process, sampler, steps)
    native = native_prediction(process)
    scheduler = scheduler_for(process, sampler.name, shift=sampler.shift)
    _set_timesteps(scheduler, steps)
    x = noise.float() * float(getattr(scheduler, "init_noise_sigma", 1.0))
    for timestep, t in zip(scheduler.timesteps, _times(scheduler, process), strict=True):
        state = x
        if process.schedule != "flow":
            scaled = scheduler.scale_model_input(x, timestep)
            state = x if process.schedule == "edm" else scaled  # `predict` scales for EDM itself
        times = t.to(x.device).expand(len(x))
        output = convert(predict(state, times).float(), state, times, process, prediction, native)
        x = scheduler.step(output, timestep, x, return_dict=False)[0]
    return x


@contextmanager
def _quiet() -> Iterator[None]:
    """Numpy tells diffusers off for ``np.array(tensor)``; the user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        yield


def _set_timesteps(scheduler: Any, steps: int) -> None:
    if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":
        # Left to itself it ends at 1/1000 and shifts that a second time, not at an even last step.
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1.0 / steps, steps).tolist())
        return
    with _quiet():
        scheduler.set_timesteps(steps)
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and bool((sigmas.diff() > 0).any()):
        # The last level stands in for infinity as 4096, and with short steps the one before it is higher.
        reason = f"the noise levels of diffusers' {type(scheduler).__name__} must fall from the first to the second"
        raise refusal("Sampler", "sampling_steps", f"smaller ({reason})", steps)


def _times(scheduler: Any, process: DiffusionProcess) -> Tensor:
    """Our times, [evaluations] float32, of a scheduler's timesteps."""
    timesteps = scheduler.timesteps
    if process.schedule == "edm":
        return karras_time(scheduler.sigmas[: len(timesteps)].float())
    if process.schedule != "flow":
        return (timesteps.float() + 1.0) / STEPS
    if type(scheduler).__name__ == "DPMSolverMultistepScheduler":  # its timesteps are cut to integers
        return scheduler.sigmas[: len(timesteps)].float()
    return timesteps.float() / STEPS


def _betas(process: DiffusionProcess) -> dict[str, Any]:
    if process.schedule in TABLES:
        first, last = process.betas_range
        return {"beta_schedule": _BETA_SCHEDULES[process.schedule], "beta_start": first, "beta_end": last}
    cumulative = torch.cat([torch.ones(1, dtype=torch.float64), alphas_cumprod(process)])
    return {"trained_betas": (1.0 - cumulative[1:] / cumulative[:-1]).tolist()}


def _diffusers(name: str) -> Any:
    try:
        from diffusers import schedulers
    except ImportError as error:
        allowed = f"builtin without diffusers, which has the others: {install_line('diffusers')}"
        raise refusal("Sampler", "name", allowed, name) from error
    return schedulers

"""Schedulers of diffusers by the name of their class, with the noise process of the training handed over.

    fields = options of the config, or of the network's pipeline
    fields |= betas, prediction type, zero terminal SNR (tables), shift (flow), noise levels (edm) of the training
    x = noise * init_noise_sigma;   for each timestep:  x = step(network(scale_model_input(x), timestep), timestep, x)

This is the loop of diffusers' pipelines. There is no list of supported classes: the scheduler is built and examined.
Its table of betas must be that of the training, and it must lead from noise to the data when the network's prediction
is exact, which is computed for four numbers.

Costs: that of the scheduler; the examination takes milliseconds.
Source: https://huggingface.co/docs/diffusers/main/en/api/schedulers/overview.
"""

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, install_line, refusal
from lit_efficient.losses.diffusion import Prediction, alpha_sigma, convert, target
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import (
    RHO,
    SIGMA_MAX,
    SIGMA_MIN,
    STEPS,
    TABLES,
    DiffusionProcess,
    alphas_cumprod,
    karras_time,
)
from lit_efficient.losses.timesteps import shift_at

Generators = torch.Generator | Sequence[torch.Generator] | None

PREDICTION_TYPES: dict[Prediction, str] = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}
_BETA_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squared_cosine": "squaredcos_cap_v2"}
# Fields that the training decides.
_OF_TRAINING = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
    "shift",
    "flow_shift",
    "use_flow_sigmas",
    "sigma_data",
)
_USUAL = {"clip_sample": False, "timestep_spacing": "trailing"}
_CLIPPING = ("thresholding", "clip_sample")  # options that keep estimates of the data in [-1, 1]
_TABLE_TOLERANCE = 1e-4  # schedulers replace the last 0 of zero terminal SNR, and compute in float32
_PROBE_TOLERANCE = 0.15  # DDIM without set_alpha_to_one leaves the noise of the first entry of the table


def scheduler_class(name: str) -> Any:
    """Return a scheduler class of diffusers.

    Raises:
        ConfigurationError: If diffusers or a package that the class needs is missing, or there is no such class.
    """
    try:
        import diffusers

        kind = getattr(diffusers, name, None)
        if isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin):
            return kind
    except ImportError as error:
        missing = " ".join(str(error).split())
        allowed = f"builtin without diffusers or a package that {name} needs ({missing}): {install_line('diffusers')}"
        raise refusal("Sampler", "name", allowed, name) from error
    allowed = f"builtin, ddim, euler, heun, dpmsolver++ or a scheduler class of diffusers {diffusers.__version__}"
    raise refusal("Sampler", "name", allowed, name)


def options_from(fields: dict[str, Any], name: str) -> dict[str, bool | int | float | str]:
    """Return the fields of a pipeline's scheduler that another class takes and the training does not decide.

    Without a spacing of the timesteps, a pipeline has that of the class.
    """
    taken = inspect.signature(scheduler_class(name).__init__).parameters
    spacing = {}
    if "timestep_spacing" in taken:
        spacing["timestep_spacing"] = taken["timestep_spacing"].default
    return spacing | {
        field: value
        for field, value in fields.items()
        if field not in _OF_TRAINING
        and (field in taken or field == "use_dynamic_shifting")
        and isinstance(value, bool | int | float | str)
    }


def named_scheduler(process: DiffusionProcess, sampler: Sampler, prediction: Prediction) -> Any:
    """Return a scheduler whose class the sampler names, for networks that were trained on ``process``.

    Raises:
        ConfigurationError: If the class is not for this process, or refuses an option.
    """
    kind = scheduler_class(sampler.name)
    taken = inspect.signature(kind.__init__).parameters
    given = dict(sampler.options or {})
    _check_option("use_dynamic_shifting", given.get("use_dynamic_shifting", False), False)
    by_resolution = bool(given.pop("use_dynamic_shifting", False)) and process.schedule == "flow"
    for name, value in given.items():
        if name in _OF_TRAINING:
            raise refusal("Sampler", f"options.{name}", "left out, because the training decides it", value)
        if name not in taken:
            raise refusal("Sampler", "options", f"arguments of {sampler.name} ({', '.join(taken)})", name)
        _check_option(name, value, taken[name].default)
    shift = shift_at(sampler.shift)
    fields = _USUAL | given | _fields_of(process, prediction, shift)
    # Flux's scheduler shifts by resolution in set_timesteps; others take the shift as a number.
    by_mu = "use_flow_sigmas" not in taken and "mu" in inspect.signature(kind.set_timesteps).parameters
    if by_resolution and by_mu:
        fields["use_dynamic_shifting"] = True
    try:
        with quietly():
            scheduler = kind(**{name: value for name, value in fields.items() if name in taken})
    except Exception as error:  # each scheduler validates in its own way
        raise _unusable(sampler.name, process, f"diffusers cannot build it: {error}") from error
    _check_kind(scheduler, process, sampler.name)
    return scheduler


def _check_option(name: str, value: object, default: object) -> None:
    """Refuse a value of another type than the default: a scheduler would take the text "no" for true."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise refusal("Sampler", f"options.{name}", "true or false", value)
    elif isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise refusal("Sampler", f"options.{name}", "a number", value)


def sample_with_named(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    process: DiffusionProcess,
    prediction: Prediction,
    sampler: Sampler,
    generator: Generators = None,
) -> Tensor:
    """Integrate from noise to data as diffusers' pipelines do with the scheduler, [B, ...] float32.

    Args:
        predict: Network: noisy data [B, ...] and times [B] in [0, 1] to a prediction [B, ...].
        noise: Standard normal noise, [B, ...].
        steps: Number of steps.
        process: Process that the network was trained on.
        prediction: Target that the network predicts.
        sampler: Sampler whose name is a class of diffusers.
        generator: Generator of schedulers that draw noise in each step, or one for each sample.
    """
    scheduler = named_scheduler(process, sampler, prediction)
    _set_steps(scheduler, steps, shift_at(sampler.shift))
    wanted = _target_of(scheduler, process, prediction)
    takes = inspect.signature(scheduler.step).parameters
    draws: dict[str, Any] = {}
    if "eta" in takes:
        draws["eta"] = 0.0
    if "generator" in takes:
        draws["generator"] = list(generator) if isinstance(generator, Sequence) else generator
    x = noise.float() * float(getattr(scheduler, "init_noise_sigma", 1.0))
    for number, timestep in enumerate(scheduler.timesteps):
        state = x
        if hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(x, timestep)  # also needed for edm: it sets the scheduler's counter
            if process.schedule != "edm":  # `predict` scales the input of EDM itself
                state = scaled
        times = _time(scheduler, process, number).to(x.device).expand(len(x))
        output = predict(state, times).float()
        if wanted != prediction:
            output = convert(output, state, times, process, prediction, wanted)
        with quietly():
            x = scheduler.step(output, timestep, x, return_dict=False, **draws)[0]
    return x


def clips(sampler: Sampler) -> bool:
    """Return whether the sampler keeps its estimates of the data in [-1, 1], the range of pixels."""
    return any((sampler.options or {}).get(name) for name in _CLIPPING)


def check_named(process: DiffusionProcess, sampler: Sampler, prediction: Prediction, steps: int) -> None:
    """Raise ConfigurationError unless the scheduler leads from noise to data in ``steps`` steps.

    The network of this probe knows the data, four numbers, so that its prediction is exact at each time.
    """
    data = torch.tensor([[[[-1.0, 0.5], [1.5, 0.0]]]])
    if clips(sampler):
        data = data.clamp(-1.0, 1.0)
    noise = torch.tensor([[[[0.3, -0.8], [1.1, -0.4]]]])

    def exact(state: Tensor, times: Tensor) -> Tensor:
        alpha, sigma = (part.view(-1, 1, 1, 1) for part in alpha_sigma(times, process))
        eps = (state - alpha * data) / sigma.clamp(min=1e-6)
        return target(data, eps, times, process, prediction)

    generator = torch.Generator().manual_seed(0)
    try:
        found = sample_with_named(exact, noise, steps, process, prediction, sampler, generator)
    except ConfigurationError:
        raise
    except Exception as error:  # each scheduler validates in its own way
        raise _unusable(sampler.name, process, f"{steps} steps fail: {error}") from error
    distance = float((found - data).abs().max())
    if not distance <= _PROBE_TOLERANCE:
        raise _unusable(
            sampler.name, process, f"{steps} steps with exact predictions do not end at the data ({distance:.2g} away)"
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress diffusers' remarks on fields that a class does not take or no longer uses, and NumPy's deprecation."""
    logger = logging.getLogger("diffusers.configuration_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _fields_of(process: DiffusionProcess, prediction: Prediction, shift: float) -> dict[str, Any]:
    """Return the fields of a scheduler that the training decides. A class ignores those that it does not take."""
    if process.schedule == "edm":
        levels = {"sigma_min": SIGMA_MIN, "sigma_max": SIGMA_MAX, "sigma_data": process.sigma_data, "rho": RHO}
        return {**levels, "prediction_type": "epsilon"}
    if process.schedule == "flow":
        flow = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
        return {**flow, "num_train_timesteps": STEPS, "shift": shift, "use_dynamic_shifting": False}
    ends = process.zero_terminal_snr or process.schedule == "cosine"
    kind = PREDICTION_TYPES.get(prediction, "v_prediction")
    fields = {"num_train_timesteps": STEPS, "prediction_type": kind, "rescale_betas_zero_snr": ends}
    return fields | betas_of(process)


def betas_of(process: DiffusionProcess) -> dict[str, object]:
    """Return the arguments of a scheduler for the betas of a variance-preserving process."""
    if process.schedule in TABLES:
        first, last = process.betas_range
        return {"beta_schedule": _BETA_SCHEDULES[process.schedule], "beta_start": first, "beta_end": last}
    cumulative = torch.cat([torch.ones(1, dtype=torch.float64), alphas_cumprod(process)])
    return {"trained_betas": (1.0 - cumulative[1:] / cumulative[:-1]).tolist()}


def _check_kind(scheduler: Any, process: DiffusionProcess, name: str) -> None:
    """Refuse a scheduler of another kind of process, or with another table of betas."""
    table: Any = getattr(scheduler, "alphas_cumprod", None)
    flows = bool(scheduler.config.get("use_flow_sigmas")) or (hasattr(scheduler, "scale_noise") and table is None)
    if process.schedule == "edm":
        fits = hasattr(scheduler, "precondition_inputs")
        reason = "it has no noise levels of EDM"
    elif process.schedule == "flow":
        fits = flows
        reason = "it does not support flow matching"
    else:
        fits = table is not None and not flows
        reason = "it has no table of betas"
        if fits:
            wanted = alphas_cumprod(process)
            found = table.double().cpu()
            fits = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=_TABLE_TOLERANCE)
            reason = "it does not take the table of betas of the training (zero terminal SNR, for example)"
    if not fits:
        raise _unusable(name, process, reason)


def _set_steps(scheduler: Any, steps: int, shift: float) -> None:
    given: dict[str, Any] = {"num_inference_steps": steps}
    if scheduler.config.get("use_dynamic_shifting"):
        # Flux's pipeline spaces the times evenly, and shifts them by exp(mu) or mu.
        given = {"sigmas": torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64).tolist()}
        given["mu"] = shift if scheduler.config.get("time_shift_type") == "linear" else math.log(shift)
    with quietly():
        scheduler.set_timesteps(**given)


def _target_of(scheduler: Any, process: DiffusionProcess, prediction: Prediction) -> Prediction:
    """Return the target that ``step`` receives."""
    if process.schedule in ("flow", "edm"):
        return "flow" if process.schedule == "flow" else "edm"
    kind = scheduler.config.get("prediction_type", "epsilon")
    return next((name for name, theirs in PREDICTION_TYPES.items() if theirs == kind), "eps")


def _time(scheduler: Any, process: DiffusionProcess, number: int) -> Tensor:
    """Return the time in [0, 1] of the scheduler's timestep with this number, float32."""
    if process.schedule == "edm":
        return karras_time(scheduler.sigmas[number].float())
    timestep = scheduler.timesteps[number].float()
    if process.schedule == "flow":
        return timestep / STEPS
    return (timestep + 1.0) / STEPS


def _unusable(name: str, process: DiffusionProcess, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"Sampler: name {name!r} cannot sample a network that was trained on {process.schedule!r}: "
        f"{' '.join(reason.split())[:300]}. Name another scheduler, or use builtin"
    )

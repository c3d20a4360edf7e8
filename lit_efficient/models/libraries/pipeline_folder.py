"""Meaning of a pipeline of diffusers: the settings that its folder declares for training and sampling its network.

    scheduler/    prediction type, betas, zero terminal SNR, shift of the timesteps (a number, or by resolution)
    vae/          scale and shift of the latents, and their channels
    model_index.json    kind of the text encoders, and the condition of an empty prompt

A network predicts what its pipeline's scheduler expects. Trained with other settings it still has a finite loss, but
it forgets what it knows. The scheduler is therefore built by diffusers and probed: the signal and the noise that it
mixes at the first, middle and last timesteps must be those of a :class:`DiffusionProcess`. Any other scheduler is
refused.

Costs: reads some small JSON files, no weights.
Source: https://huggingface.co/docs/diffusers/main/en/using-diffusers/loading.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.named_schedulers import quietly
from lit_efficient.losses.noise_process import (
    RHO,
    SIGMA_MAX,
    SIGMA_MIN,
    STEPS,
    DiffusionProcess,
    Schedule,
    alphas_cumprod,
)
from lit_efficient.losses.timesteps import ResolutionShift
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig

Scaling = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel of latents
EmptyCaption = Literal["encoded", "zeros"]
TextKind = Literal["sd", "sdxl", "sd3", "sd3_clip", "flux", "pixart", "sana", "qwen_image", "z_image"]

_INDEX = "model_index.json"
_SCHEDULER = "scheduler/scheduler_config.json"
_VAE = "vae/config.json"
# Names of targets in schedulers of diffusers, and in this package.
_TARGETS: dict[str, Prediction] = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
_SCHEDULES: dict[str, Schedule] = {
    "linear": "linear",
    "scaled_linear": "scaled_linear",
    "squaredcos_cap_v2": "squared_cosine",
}
_TOLERANCE = 1e-4  # of alpha^2; schedulers replace the last 0 of zero terminal SNR by 6e-8, and compute in float32


@dataclass(frozen=True)
class PipelineMeaning:
    """Settings that a pipeline declares."""

    source: str  # folder or name on a hub
    pipeline: str  # name of the pipeline's class; "" if the folder does not contain model_index.json
    scheduler_fields: dict[str, Any]  # content of its file
    prediction: Prediction  # target that the network predicts
    process: DiffusionProcess  # noise process of its training
    shift: float | ResolutionShift  # shift of the timesteps
    empty_caption: EmptyCaption  # condition of the prediction without a prompt
    scaling: Scaling | None  # mean and std of each channel of latents
    text: TextKind | None  # kind of the text encoders; None: unknown, or there are none
    text_length: int | None  # tokens of a caption, in pipelines with a text encoder of any length

    @property
    def channels(self) -> int | None:
        """Channels of the latents, or None without an autoencoder."""
        if self.scaling is None:
            return None
        return len(self.scaling[0])


def pipeline_root(name_or_path: str, subfolder: str) -> tuple[str, str]:
    """Return the pipeline that contains a model, and the model's subfolder in it.

    The folder of a model without ``subfolder`` may be part of a pipeline's folder: ``FOLDER/unet``.
    """
    path = Path(name_or_path).expanduser()
    if not subfolder and path.is_dir() and not _is_pipeline(path) and _is_pipeline(path.resolve().parent):
        return str(path.resolve().parent), path.resolve().name
    return name_or_path, subfolder


def in_pipeline(spec: DiffusersModelConfig, roles: Sequence[str]) -> DiffusersModelConfig:
    """Return the description of a model in a pipeline: with ``subfolder`` if only the pipeline is named.

    Args:
        spec: Description of a model or of a pipeline.
        roles: Subfolders of a pipeline that may contain the model; the first that exists is taken.
    """
    if spec.draws_weights or spec.subfolder:
        return spec
    index = _read(spec.place, _INDEX, spec.revision) or {}
    found = next((role for role in roles if (index.get(role) or [None])[0] is not None), "")
    return replace(spec, subfolder=found)


def read_meaning(name_or_path: str, subfolder: str = "", revision: str | None = None) -> PipelineMeaning | None:
    """Return the settings that a pipeline declares for its network.

    Args:
        name_or_path: Folder of the pipeline or of its network, or the pipeline's name on a hub.
        subfolder: Folder of the network in the pipeline.
        revision: Branch, tag or commit on a hub.

    Returns:
        The settings, or ``None`` if the network is not part of a pipeline.

    Raises:
        ConfigurationError: If a setting is one that this package cannot train with.
    """
    root, _ = pipeline_root(name_or_path, subfolder)
    index = _read(root, _INDEX, revision)
    if (index or {}).get("requires_aesthetics_score"):
        raise ConfigurationError(
            f"{root} is a refiner of SDXL, whose network takes an aesthetics score in the place of a size, and one "
            "text encoder. Training it is not supported: name the base pipeline"
        )
    fields = _read(root, _SCHEDULER, revision)
    if fields is None:
        if index is None:
            return None
        raise ConfigurationError(
            f"{root} is a pipeline without {_SCHEDULER}, which declares what its network predicts: copy that file from "
            "the original pipeline"
        )
    vae = _read(root, _VAE, revision)
    pipeline = str((index or {}).get("_class_name") or "")
    with torch.device("cpu"):  # `plan` builds the module on the meta device, which has no values to compare
        prediction, process = _target(root, fields)
        shift = _shift(fields)
    zeros = bool((index or {}).get("force_zeros_for_empty_prompt"))
    return PipelineMeaning(
        source=root,
        pipeline=pipeline,
        scheduler_fields=fields,
        prediction=prediction,
        process=process,
        shift=shift,
        empty_caption="zeros" if zeros else "encoded",
        scaling=None if vae is None else declared_scaling(vae),
        text=text_kind(index or {}),
        text_length=text_length(pipeline),
    )


def text_kind(index: Mapping[str, Any]) -> TextKind | None:
    """Return the kind of a pipeline's text encoders from the classes in its ``model_index.json``."""
    network = (index.get("unet") or index.get("transformer") or [None, None])[1]
    kinds: dict[str, TextKind] = {
        "SD3Transformer2DModel": "sd3",
        "FluxTransformer2DModel": "flux",
        "PixArtTransformer2DModel": "pixart",
        "SanaTransformer2DModel": "sana",
        "QwenImageTransformer2DModel": "qwen_image",
        "ZImageTransformer2DModel": "z_image",
    }
    if network == "UNet2DConditionModel":
        reads = [str((index.get(name) or [None, None])[1]) for name in ("text_encoder", "text_encoder_2")]
        if reads[0].startswith("CLIPText"):
            if reads[1].startswith("CLIPText"):
                return "sdxl"
            return "sd"
        return None
    if network == "SD3Transformer2DModel" and (index.get("text_encoder_3") or [None, None])[1] is None:
        return "sd3_clip"
    return kinds.get(str(network))


def declared_scaling(fields: Mapping[str, Any]) -> Scaling:
    """Return mean and standard deviation of each channel of latents that an autoencoder's configuration declares.

    They are those of diffusers' pipelines: ``(z - latents_mean) scaling_factor / latents_std`` where these are given,
    and ``(z - shift_factor) scaling_factor`` otherwise.
    """
    scale = float(fields.get("scaling_factor") or 1.0)
    mean = fields.get("latents_mean")
    std = fields.get("latents_std")
    if mean is not None and std is not None:
        return tuple(float(value) for value in mean), tuple(float(value) / scale for value in std)
    channels = int(fields.get("latent_channels") or fields["z_dim"])
    return (float(fields.get("shift_factor") or 0.0),) * channels, (1.0 / scale,) * channels


def pipeline_index(name_or_path: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the content of a pipeline's ``model_index.json``, or ``None`` for what is no pipeline."""
    return _read(name_or_path, _INDEX, revision)


def text_length(pipeline: str) -> int | None:
    """Return the number of tokens that a pipeline's call gives its longest text encoder, if its class says so."""
    import diffusers

    kind = getattr(diffusers, pipeline, None)
    if kind is None or not pipeline:
        return None
    parameter = inspect.signature(kind.__call__).parameters.get("max_sequence_length")
    if parameter is None:
        return None
    return parameter.default


def _is_pipeline(folder: Path) -> bool:
    return (folder / _INDEX).is_file() or (folder / _SCHEDULER).is_file()


def _read(root: str, name: str, revision: str | None) -> dict[str, Any] | None:
    """Return the content of a JSON file in a folder or in a hub's repository, or ``None`` if it does not exist."""
    folder = Path(root).expanduser()
    if folder.is_dir():
        file = folder / name
        if not file.is_file():
            return None
    else:
        found = _downloaded(root, name, revision)
        if found is None:
            return None
        file = Path(found)
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} contains no JSON object, but {type(content).__name__}")
    return content


@lru_cache(maxsize=64)
def _downloaded(name: str, file: str, revision: str | None) -> str | None:
    """Return the path of a file of a hub's repository, or ``None`` if it does not exist.

    Raises:
        ConfigurationError: If the repository is known here, but not whether it has this file.
    """
    from huggingface_hub import constants, hf_hub_download, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, EntryNotFoundError, LocalEntryNotFoundError

    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    try:
        return str(hf_hub_download(name, file, revision=revision))
    except EntryNotFoundError as error:
        if not isinstance(error, LocalEntryNotFoundError):
            return None
        reason = error
    except (OSError, ValueError):  # no such repository: building the model says so
        return None
    try:
        known = any(repo.repo_id == name for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos)
    except CacheNotFound:
        known = False
    if not known:  # nothing of it can be read, as building the model says
        return None
    raise ConfigurationError(
        f"{name} is in the local cache without {file}, and the hub cannot be reached: download the whole pipeline once "
        f"(hf download {name})"
    ) from reason


def _target(root: str, fields: Mapping[str, Any]) -> tuple[Prediction, DiffusionProcess]:
    """Return the target and the process of a scheduler's configuration."""
    place = f"{root}/{_SCHEDULER}"
    scheduler = _scheduler(place, fields)
    config = scheduler.config
    steps = config.get("num_train_timesteps", STEPS)
    if steps != STEPS:
        raise refusal(place, "num_train_timesteps", str(STEPS), steps)
    declared = config.get("prediction_type")
    name = type(scheduler).__name__
    if hasattr(scheduler, "precondition_inputs"):
        return "edm", _edm(place, scheduler, declared)
    if config.get("use_flow_sigmas") or (
        hasattr(scheduler, "scale_noise") and not hasattr(scheduler, "alphas_cumprod")
    ):
        return "flow", _flow(place, scheduler, declared)
    if not hasattr(scheduler, "alphas_cumprod"):
        raise ConfigurationError(
            f"{place}: _class_name {name!r} is no scheduler that networks can be trained for here: it has neither a "
            "table of betas, nor flow matching, nor EDM's noise levels"
        )
    if declared not in _TARGETS:
        raise refusal(place, "prediction_type", f"one of {', '.join(_TARGETS)} for {name}", declared)
    return _TARGETS[declared], _table(place, scheduler)


def _scheduler(place: str, fields: Mapping[str, Any]) -> Any:
    """Build the scheduler as diffusers does, with the class's defaults for fields that the file leaves out."""
    import diffusers

    name = str(fields.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise ConfigurationError(f"{place}: _class_name {name!r} is no scheduler of diffusers {diffusers.__version__}")
    try:
        with quietly():
            return kind.from_config(dict(fields))
    except Exception as error:  # each scheduler validates in its own way
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{place}: diffusers cannot build {name} from it: {reason}") from error


def _edm(place: str, scheduler: Any, declared: object) -> DiffusionProcess:
    config = scheduler.config
    if declared not in (None, "epsilon"):
        raise refusal(place, "prediction_type", f"epsilon for {type(scheduler).__name__}", declared)
    for name, known in (("sigma_min", SIGMA_MIN), ("sigma_max", SIGMA_MAX), ("rho", RHO)):
        if config.get(name, known) != known:
            raise refusal(place, name, f"{known} for EDM's noise levels", config[name])
    return DiffusionProcess("edm", sigma_data=float(config["sigma_data"]))


def _flow(place: str, scheduler: Any, declared: object) -> DiffusionProcess:
    name = type(scheduler).__name__
    if declared not in (None, "flow_prediction"):
        raise refusal(place, "prediction_type", f"flow_prediction for {name} with flow matching", declared)
    if scheduler.config.get("invert_sigmas"):
        raise refusal(place, "invert_sigmas", "false (time 1 is noise here)", True)
    return DiffusionProcess("flow")


def _table(place: str, scheduler: Any) -> DiffusionProcess:
    """Return the process whose amounts of signal are those of the scheduler's table."""
    config = scheduler.config
    if config.get("timestep_type", "discrete") != "discrete":
        raise refusal(place, "timestep_type", "discrete", config["timestep_type"])
    schedule = _SCHEDULES.get(str(config.get("beta_schedule")))
    found = scheduler.alphas_cumprod.double()
    if schedule is not None:
        first = None
        last = None
        if schedule != "squared_cosine":
            first = float(config["beta_start"])
            last = float(config["beta_end"])
        for zero in (False, True):
            process = DiffusionProcess(schedule, first, last, zero)
            expected = alphas_cumprod(process)
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=_TOLERANCE, atol=1e-7):
                return process
    raise ConfigurationError(
        f"{place}: {type(scheduler).__name__} with beta_schedule {config.get('beta_schedule')!r} has a table of betas "
        f"that is none of {', '.join(_SCHEDULES)}, with or without zero terminal SNR: trained_betas and other changes "
        "of the table are not supported"
    )


def _shift(fields: Mapping[str, Any]) -> float | ResolutionShift:
    """Return the shift of the timesteps that a scheduler of flow matching declares; 1 for the others."""
    scheduler = _scheduler("", fields)
    config = scheduler.config
    if config.get("use_dynamic_shifting"):
        return ResolutionShift(
            base_tokens=int(config.get("base_image_seq_len") or 256),
            max_tokens=int(config.get("max_image_seq_len") or 4096),
            base_shift=float(config.get("base_shift") or 0.5),
            max_shift=float(config.get("max_shift") or 1.15),
            kind=config.get("time_shift_type") or "exponential",
        )
    if config.get("use_flow_sigmas"):
        return float(config.get("flow_shift") or 1.0)
    if hasattr(scheduler, "alphas_cumprod"):
        return 1.0
    return float(config.get("shift") or 1.0)

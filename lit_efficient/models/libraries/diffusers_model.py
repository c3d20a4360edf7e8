"""Models of diffusers: weights from a hub or a folder, or random weights for a configuration.

Weights are read from safetensors only. Code in a repository is never run.

Costs: the model's memory
Source: https://huggingface.co/docs/diffusers/main/en/api/models/overview.
"""

import difflib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from lit_efficient.distributed.weight_slices import Waiting, built_empty, fill_waiting, stored_places
from lit_efficient.errors import (
    CheckpointError,
    ConfigurationError,
    check_installed,
    check_number,
    checks_types,
    refusal,
)
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import map_tensors
from lit_efficient.internals.hugging_face import bars_on_terminals, keeps_float32
from lit_efficient.internals.torch_dispatch import fakes_are_made
from lit_efficient.models.libraries.causal_lm import Primitive
from lit_efficient.models.libraries.config_fields import (
    check_names,
    check_names_class,
    check_values,
    check_whole,
    files_variant,
    library_errors,
    unusual,
)
from lit_efficient.models.libraries.tiny_pipelines import local_name
from lit_efficient.surgery import WAITS

if TYPE_CHECKING:
    from diffusers import ModelMixin

_OWNER = "DiffusersModelConfig"
# Beginning of a tensor's name in a checkpoint of one file -> pipeline of diffusers; the first that occurs counts.
_PIPELINES = {
    "conditioner.embedders.1.": "StableDiffusionXLPipeline",
    "conditioner.embedders.0.model.": "StableDiffusionXLImg2ImgPipeline",
    "model.diffusion_model.joint_blocks.": "StableDiffusion3Pipeline",
    "joint_blocks.": "StableDiffusion3Pipeline",
    "model.diffusion_model.double_blocks.": "FluxPipeline",
    "double_blocks.": "FluxPipeline",
    "cond_stage_model.": "StableDiffusionPipeline",
}


@checks_types
@dataclass(frozen=True)
class DiffusersModelConfig:
    """Model of diffusers, by name or by configuration.

    Args:
        name_or_path: a name on a hub or a local folder, of the model or of a pipeline (with ``subfolder``); or a
            checkpoint in one file (with ``config``); or ``tiny:FAMILY`` (sd15, sdxl, sd3, flux), a tiny random pipeline
            that is built offline; None builds the model from ``config_fields`` alone.
        config_fields: fields that replace those of the named model's configuration; without ``name_or_path`` the whole
            configuration, with ``_class_name`` (``AutoencoderKL``, ``UNet2DConditionModel``, ...).
        subfolder: folder of the model in a pipeline: ``vae``, ``unet``, ``transformer``.
        random_weights: draw new weights although ``name_or_path`` has some.
        revision: branch, tag or commit of a hub's repository; only a commit never changes.
        dtype: number format of the weights.
        config: folder or name of the pipeline that has the configurations of a checkpoint in one file.
        variant: variant of the weights, such as ``fp16``; None takes the files without one, or a folder's only one.
        guidance: guidance scale that a guidance-distilled network (FLUX.1-dev) receives as an input, in training and in
            sampling; other networks take none.
    """

    name_or_path: str | None = None
    config_fields: dict[str, Primitive | list[Primitive | list[Primitive]] | dict[str, Primitive]] | None = None
    subfolder: str = ""
    random_weights: bool = False
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    guidance: float = 3.5
    config: str | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name_or_path", local_name(self.name_or_path))
        if self.name_or_path is None:
            check_names_class(_OWNER, "_class_name", self.config_fields or {})
        check_number(_OWNER, "guidance", self.guidance, least=0)
        check_single_file(_OWNER, self.name_or_path, self.config)
        check_installed(_OWNER, "diffusers")

    @property
    def draws_weights(self) -> bool:
        """Return whether the weights are random."""
        return self.name_or_path is None or self.random_weights

    @property
    def place(self) -> str:
        """Return the folder or name from which configurations are read."""
        return str(self.config or self.name_or_path)

    @property
    def described(self) -> str:
        """Return the name of the model, or of its class."""
        if self.name_or_path is None:
            return str((self.config_fields or {})["_class_name"])
        return f"{self.name_or_path}/{self.subfolder}".rstrip("/")


def resolve(spec: DiffusersModelConfig) -> dict[str, Any]:
    """Return the whole configuration of the model, including ``_class_name``, in types that JSON has.

    Raises:
        ConfigurationError: for a name that has no configuration, an unknown class or an unknown field.
    """
    fields = dict(spec.config_fields or {})
    if spec.name_or_path is not None:
        fields = _stored(spec) | fields
    kind = model_class(str(fields.get("_class_name")))
    known = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    given = [name for name in spec.config_fields or {} if not name.startswith("_")]
    check_names(_OWNER, given, known, kind.__name__)
    defaults = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    check_values(_OWNER, spec.config_fields or {}, defaults)
    kept = {name: value for name, value in fields.items() if name in known}
    return {"_class_name": kind.__name__, **json.loads(json.dumps(kept))}


def build(spec: DiffusersModelConfig) -> "ModelMixin":
    """Build the model, in training mode. Random weights come from torch's global generator.

    Raises:
        ConfigurationError: if the model cannot be built or loaded.
    """
    fields = resolve(spec)
    kind = model_class(fields["_class_name"])
    dtype = getattr(torch, spec.dtype)
    if spec.draws_weights:
        drawn: Any
        if dtype == torch.float32:
            drawn = from_fields(fields)
        else:
            drawn = _converted(fields, dtype)
            fill_waiting(drawn, torch.device("cpu"))  # converts each tensor as soon as it is drawn
        return cast("ModelMixin", drawn.train())
    if fakes_are_made():  # a plan needs shapes alone
        return cast("ModelMixin", nn.Module.to(cast(nn.Module, from_fields(fields)), dtype).train())
    changed = {name: fields[name] for name in spec.config_fields or {} if name in fields and name != "_class_name"}
    if spec.config is not None:
        return cast("ModelMixin", _from_single_file(spec, kind, changed).train())
    check_sums(spec.name_or_path, spec.subfolder)
    variant = spec.variant or files_variant(Path(str(spec.name_or_path), spec.subfolder), _OWNER)
    try:
        with bars_on_terminals():
            model: Any = kind.from_pretrained(
                spec.name_or_path,
                subfolder=spec.subfolder or None,
                revision=spec.revision,
                variant=variant,
                torch_dtype=dtype,
                use_safetensors=True,
                **changed,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{_OWNER}: {spec.described!r} cannot be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    return model.train()


def build_empty(spec: DiffusersModelConfig) -> "nn.Module | None":
    """Build the model without memory for its weights, which ``fill_waiting`` reads after sharding.

    Returns:
        The model in training mode. ``None`` where :func:`build` does more than read a folder's files under the
        network's own names.
    """
    fields = resolve(spec)
    if spec.draws_weights:
        return _converted(fields, getattr(torch, spec.dtype)).train()
    if spec.config is not None or spec.variant is not None:
        return None
    folder = Path(str(spec.name_or_path)).expanduser() / spec.subfolder
    dtype = getattr(torch, spec.dtype)
    try:
        stored = stored_places(folder).keys()
    except CheckpointError:
        return None  # a name on a hub, a folder with several variants, or an error that `build` raises
    with torch.device("meta"):
        model: Any = nn.Module.to(cast(nn.Module, from_fields(fields)), dtype)
    held = model.state_dict().keys()
    mixed = dtype != torch.float32 and keeps_float32(model)
    if mixed or stored != held or not held >= {name for name, _ in model.named_buffers()}:
        return None
    model.__dict__[WAITS] = Waiting(str(folder), {name: p.dtype for name, p in model.named_parameters()})
    return cast("nn.Module", model.train())


def _converted(fields: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return a network of random weights in another format, whose weights wait. Its own ``to`` would warn about the
    format.
    """
    return built_empty(lambda: nn.Module.to(cast(nn.Module, from_fields(fields)), dtype))


def from_fields(fields: dict[str, Any]) -> "ModelMixin":
    """Build a model with random weights from its whole configuration, as `resolve` returns it and checkpoints
    store it.
    """
    kind = model_class(str(fields.get("_class_name")))
    try:
        made = kind(**{name: value for name, value in fields.items() if not name.startswith("_")})
    except Exception as error:  # each model validates in its own way
        raise fields_error(fields, error) from error
    check_whole(_OWNER, made, fields)
    return cast("ModelMixin", made)


def fields_error(fields: dict[str, Any], error: Exception) -> ConfigurationError:
    """Return the error for fields that do not make a model: the reason, and the fields that are unlike their
    defaults.
    """
    kind = model_class(str(fields.get("_class_name")))
    taken = inspect.signature(kind.__init__).parameters
    odd = [
        f"{name}: {'null' if value is None else value}"
        for name, value in fields.items()
        if name in taken and not _is_like(value, taken[name].default)
    ]
    hint = f" ({', '.join(odd)})" if odd else unusual(fields)
    reason = " ".join(str(error).split())
    return ConfigurationError(f"{_OWNER}: config_fields do not make a {kind.__name__}: {reason}{hint}")


def _is_like(value: object, default: object) -> bool:
    """Return whether a value has the type of a field's default. Every value does if there is no default."""
    if default is None or default is inspect.Parameter.empty:
        return value is not None or default is None
    kinds = ((int, float), (list, tuple), (str,), (dict,))
    return any(isinstance(value, kind) and isinstance(default, kind) for kind in kinds)


def model_class(name: str) -> Any:
    """Return the class of diffusers that has this name.

    Raises:
        ConfigurationError: if there is none, or it is not a model.
    """
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        models = [known for known in dir(diffusers) if known.endswith(("Model", "ModelV2")) or "Autoencoder" in known]
        near = difflib.get_close_matches(name, models, n=3)
        hint = f" (similar names: {', '.join(near)})" if near else ""
        raise refusal(_OWNER, "_class_name", f"a model of diffusers{hint}", name)
    return kind


def check_single_file(owner: str, name_or_path: str | None, config: str | None) -> None:
    """Raise ConfigurationError for a ``config`` without a checkpoint in one file."""
    path = Path(name_or_path or "").expanduser()
    if config is not None and (path.suffix != ".safetensors" or not path.is_file()):
        raise refusal(owner, "name_or_path", "an existing .safetensors file with config", name_or_path)
    if config is not None:  # without accelerate, diffusers leaves weights that the file lacks at random values
        check_installed(f"{owner}: {name_or_path}, a checkpoint in one file,", "diffusers", "accelerate")


def _from_single_file(spec: DiffusersModelConfig, kind: Any, changed: dict[str, Any]) -> nn.Module:
    """Load the model from a checkpoint in one file, which diffusers converts.

    Raises:
        ConfigurationError: If the file cannot be converted or lacks weights.
    """
    path = Path(str(spec.name_or_path)).expanduser()
    if not hasattr(kind, "from_single_file"):
        raise refusal(_OWNER, "name_or_path", f"a folder: diffusers reads no single file of {kind.__name__}", str(path))
    with library_errors(f"{_OWNER}: {path} has no {kind.__name__} of {spec.config}/{spec.subfolder}"):
        model: nn.Module = kind.from_single_file(
            str(path),
            config=spec.config,
            subfolder=spec.subfolder or None,
            torch_dtype=getattr(torch, spec.dtype),
            **changed,
        )
    check_complete(_OWNER, model, path)
    return model


def check_complete(owner: str, model: nn.Module, path: Path) -> None:
    """Raise ConfigurationError if a file left weights of a model without values."""
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ConfigurationError(
            f"{owner}: {path} lacks {len(missing)} of the weights of {type(model).__name__}, such as {missing[0]}: "
            "name a config of the same architecture"
        )


def _single_file(path: Path) -> ConfigurationError:
    """Return the error for a checkpoint in one file, such as those of civitai: its configuration is on a hub."""
    pipeline = "StableDiffusionXLPipeline"
    if path.suffix == ".safetensors":
        names = list(map_tensors(path).keys())
        for key, kind in _PIPELINES.items():
            if any(name.startswith(key) for name in names):
                pipeline = kind
                break
    return ConfigurationError(
        f"{_OWNER}: name_or_path: {path} is a checkpoint in one file. Set config to the folder or name of a pipeline "
        "of the same kind. Or convert the file once (diffusers downloads the configurations): "
        f'python -c "from diffusers import {pipeline} as P; '
        f"P.from_single_file('{path}').save_pretrained('{path.stem}')\"  and set name_or_path: {path.stem} with "
        "subfolder: unet, transformer or vae."
    )


def _stored(spec: DiffusersModelConfig) -> dict[str, Any]:
    from diffusers import ModelMixin
    from diffusers.configuration_utils import ConfigMixin

    name = spec.place
    if Path(name).expanduser().is_file():
        raise _single_file(Path(name).expanduser())
    if not Path(name).expanduser().is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigurationError(f"{_OWNER}: name_or_path: there is no folder {name}.")
    check_sums(name, spec.subfolder, weights=False)
    reader: Any = type("Reader", (ModelMixin, ConfigMixin), {"config_name": "config.json"})
    try:
        fields: Any = reader.load_config(name, subfolder=spec.subfolder or None, revision=spec.revision)
    except (OSError, ValueError) as error:
        subfolder = f"subfolder: {spec.subfolder}"
        hint = subfolder if spec.subfolder else f"a pipeline's folder needs {subfolder}vae, unet or transformer"
        raise ConfigurationError(
            f"{_OWNER}: name_or_path: {spec.described!r} has no config.json that can be read ({hint}): "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    return dict(fields)

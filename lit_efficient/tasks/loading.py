"""Loading of models from checkpoints of this package, and of language models from Hugging Face."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lit_efficient
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.sums import check_sums
from lit_efficient.mechanisms.restore import take_weights
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.libraries.gguf_file import is_gguf, read_tokenizer
from lit_efficient.surgery import own_draws
from lit_efficient.tasks.language_modeling import LanguageModeling

_Class = TypeVar("_Class")


def load_language_model(path: str, weights: Any = "auto") -> tuple[Any, str]:
    """Load a language model in eval mode, and return it with the kind of its weights.

    Args:
        path: Checkpoint of `LanguageModeling`, or of a task derived from it.
        weights: ``auto``, ``average`` or ``raw``. See `lit_efficient.restore`.

    Raises:
        CheckpointError: If the file cannot be read, or is not of a language model.
    """
    return language_model_of(read_language_model(path), path, weights)


def language_model_of(
    checkpoint: dict[str, Any], path: str, weights: Any = "auto", base: str | None = None
) -> tuple[Any, str]:
    """Build the language model of a checkpoint that has been read, as `load_language_model` does.

    Args:
        checkpoint: Contents of the checkpoint.
        path: Path of the checkpoint, for errors.
        weights: ``auto``, ``average`` or ``raw``.
        base: Base of adapters, if the checkpoint does not contain or name it: a folder of transformers, a GGUF file, a
            checkpoint or a safetensors file.
    """
    given = None  # weights of the base
    if base is not None and Path(base).is_file() and not is_gguf(base):
        given = read_checkpoint(base)["state_dict"]
    cls = _task(checkpoint, path)
    known = inspect.signature(cls).parameters  # hyper-parameters may belong to a task that is derived from `cls`
    arguments = {name: value for name, value in checkpoint["hyper_parameters"].items() if name in known}
    if base is not None and given is None and "config_fields" in arguments["model"]:
        fields = arguments["model"]["config_fields"] if arguments["model"]["name_or_path"] else None
        named = {"name_or_path": base, "random_weights": False, "config_fields": fields}
        arguments["model"] = {**arguments["model"], **named}
    model = cls(**arguments)
    if given is None:
        model.on_load_checkpoint(checkpoint)
    else:
        model.on_load_checkpoint({**checkpoint, "state_dict": {**given, **checkpoint["state_dict"]}})
        model.load_state_dict(given, strict=False)
    return model, take_weights(model, checkpoint, weights)


def read_language_model(path: str) -> dict[str, Any]:
    """Read a checkpoint of `LanguageModeling`, or of a task derived from it.

    Raises:
        CheckpointError: If the file cannot be read, or is not of a language model.
    """
    checkpoint = read_checkpoint(path)
    if "language_modeling" not in checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint of LanguageModeling")
    return checkpoint


def load_latent_diffusion(path: str, weights: Any = "auto") -> tuple[Any, str]:
    """Load a `LatentDiffusion` with its encoders in eval mode, and return it with the kind of its weights.

    Args:
        path: The checkpoint.
        weights: ``auto``, ``average`` or ``raw``. See `lit_efficient.restore`.

    Raises:
        CheckpointError: If the file cannot be read, or is not of this task or one derived from it.
    """
    checkpoint = read_checkpoint(path)
    if "latent_diffusion" not in checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint of LatentDiffusion")
    with own_draws():
        model = latent_diffusion_of(checkpoint, path)
        model.configure_model()
    model.on_load_checkpoint(checkpoint)
    return model, take_weights(model, checkpoint, weights)


def latent_diffusion_of(checkpoint: Mapping[str, Any], path: object) -> Any:
    """Return the module of a checkpoint of latent diffusion by its arguments, without network and weights.

    Raises:
        CheckpointError: If the checkpoint is of a task that this package does not have.
    """
    from lit_efficient.tasks.latent_diffusion import LatentDiffusion  # language models do not need it

    cls = _class_of(checkpoint["latent_diffusion"]["task"], path, LatentDiffusion, "a latent diffusion model")
    known = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in checkpoint["hyper_parameters"].items() if name in known})


def _task(checkpoint: Mapping[str, Any], path: str) -> type[LanguageModeling]:
    """Return the class that a checkpoint of a language model names."""
    return _class_of(checkpoint["language_modeling"]["task"], path, LanguageModeling, "a language model")


def _class_of(name: object, path: object, base: type[_Class], noun: str) -> type[_Class]:
    """Return a class by its name. Only public tasks are allowed, so that a file cannot run other code."""
    if not lit_efficient.PUBLIC.get(str(name), "").startswith("tasks."):
        raise CheckpointError(f"{path} is of the task {name!r}, which this package does not have")
    cls = getattr(lit_efficient, str(name))
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise CheckpointError(f"{path} is of the task {name!r}, which is not {noun}")
    return cls


def load_hugging_face(spec: CausalLMConfig) -> Any:
    """Load a model of Hugging Face with its tokenizer as a `LanguageModeling` in eval mode.

    Raises:
        ConfigurationError: If the model or its tokenizer cannot be read.
    """
    model = LanguageModeling(spec)
    model.tokenizer_state = hugging_face_tokenizer(spec)
    if model.tokenizer_state is None:
        raise ConfigurationError(f"{spec.name_or_path} has no tokenizer: save it there (tokenizer.save_pretrained)")
    model.configure_model()
    return model.eval()


def hugging_face_tokenizer(spec: CausalLMConfig) -> dict[str, Any] | None:
    """Return the tokenizer of a model in the format of checkpoints, or ``None`` for a folder without one.

    Raises:
        ConfigurationError: If the tokenizer cannot be read.
    """
    folder = Path(spec.name_or_path or "")
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    check_sums(folder, weights=False)
    try:
        return pack_tokenizer(read_tokenizer(str(spec.name_or_path), revision=spec.revision))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(
            f"The tokenizer of {spec.name_or_path} cannot be read: {str(error).splitlines()[0]}"
        ) from error

"""Checks of the configurations of other packages' models, which would fail without naming a field, or not at all."""

import contextlib
import copy
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_efficient.errors import ConfigurationError, LitEfficientError, did_you_mean, is_out_of_memory, refusal
from lit_efficient.internals.hugging_face import from_config

_WEIGHTS = re.compile(r"(?:model|diffusion_pytorch_model)(?:\.(?P<variant>\w+))?(?:-\d+-of-\d+)?\.safetensors")
_MOST = 2**32
# A model with fewer layers and parameters than these is built quickly, and passes in any case.
_LAYERS = 1_000
_PARAMETERS = 2**26
_LAYER_BYTES = 64  # bytes of files per layer: less than the names of its tensors take
_PER_BYTE = 8  # parameters per byte of the files: formats of one bit


def files_variant(folder: str | Path, who: str) -> str | None:
    """Return the ``variant`` with which Hugging Face's loaders find the weights of a folder, such as ``fp16``.

    ``model.fp16.safetensors`` has the variant ``fp16``. The result is None if the folder has weights without a
    variant, or no weights, or is no folder.

    Args:
        folder: Folder of a model.
        who: Class that reads the folder, for messages.

    Raises:
        ConfigurationError: If there are several variants and no weights without one.
    """
    place = Path(folder).expanduser()
    matched = [_WEIGHTS.fullmatch(path.name) for path in place.glob("*.safetensors")] if place.is_dir() else []
    found = sorted({match["variant"] or "" for match in matched if match})
    if not found or found[0] == "":
        return None
    if len(found) > 1:
        raise ConfigurationError(
            f"{who}: {place} has the weights in {len(found)} variants ({', '.join(found)}), and none without a "
            "variant. Keep the files of one variant."
        )
    return found[0]


@contextlib.contextmanager
def library_errors(said: str, fields: Mapping[str, object] | None = None) -> Iterator[None]:
    """Turn exceptions that another package raises over files or fields into ConfigurationErrors that start with
    ``said``.

    Each model fails in its own way, so that every exception is caught. Lack of memory, and of weights on the meta
    device, is raised unchanged.

    Raises:
        ConfigurationError: With the reason, and those of ``fields`` whose values are unusual.
    """
    try:
        yield
    except Exception as error:
        weightless = isinstance(error, RuntimeError) and torch.get_default_device().type == "meta"
        if weightless or isinstance(error, LitEfficientError) or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ConfigurationError(f"{said}: {reason}{unusual(fields or {})}") from error


def check_values(owner: str, fields: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse values that are not a number, numbers below 0 where the default is above 0, and integers too large for a
    size.

    Raises:
        ConfigurationError: Naming the field.
    """
    for name, value in fields.items():
        default = defaults.get(name)
        least = isinstance(default, int | float) and default > 0
        if isinstance(value, int | float) and (math.isnan(value) or (least and value < 0)):
            raise refusal(owner, f"config_fields.{name}", "a number of at least 0" if least else "a number", value)
        if isinstance(value, int) and value >= _MOST:  # a number of layers would never be finished
            raise refusal(owner, f"config_fields.{name}", f"below {_MOST}", value)


def check_names(owner: str, fields: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Refuse fields that ``kind`` does not have.

    Raises:
        ConfigurationError: Naming the first such field, and similar ones that exist.
    """
    known = set(known)
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=3)
        raise ConfigurationError(
            f"{owner}: config_fields has {unknown!r}, which is not a field of {kind}"
            f"{'; similar fields: ' + ', '.join(near) if near else ''}."
        )


def misspelling_hint(name: str, fields: Iterable[str]) -> str:
    """Return a hint for a message about the missing field ``name``: the given field that may be a misspelling of it."""
    for one in fields:
        near = did_you_mean(one, [name])
        if near:
            return f": {one!r}{near}"
    return ""


def check_names_class(owner: str, key: str, fields: Mapping[str, object]) -> None:
    """Refuse a whole configuration without the field ``key``, which names the class of the model.

    Raises:
        ConfigurationError: With a field that may be a misspelling of ``key``.
    """
    if key not in fields:
        hint = misspelling_hint(key, fields)
        allowed = f"a hub's name or a folder, as config_fields={fields or None!r} has no {key}{hint}"
        raise refusal(owner, "name_or_path", allowed, None)


def unusual(fields: Mapping[str, object]) -> str:
    """Return, in brackets for the end of a message, the fields with values that few networks can have, or an empty
    string.
    """
    odd = [f"{name}: {value}" for name, value in fields.items() if _is_unusual(value)]
    if odd:
        return f" ({', '.join(odd)})"
    return ""


def _is_unusual(value: object) -> bool:
    if isinstance(value, list | tuple):
        return not value or any(map(_is_unusual, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < _MOST


def check_whole(owner: str, model: nn.Module, fields: Mapping[str, object]) -> None:
    """Refuse a network that has weights without elements.

    Raises:
        ConfigurationError: Naming the first such weight, and the fields with unusual values.
    """
    empty = next((name for name, p in model.named_parameters() if p.numel() == 0 and unusual(fields)), None)
    if empty is not None:
        raise ConfigurationError(
            f"{owner}: config_fields make a {type(model).__name__} whose {empty} is empty{unusual(fields)}"
        )


def check_bounds(who: str, folder: str | None, config: Any, kind: Any, subfolder: str = "") -> None:
    """Refuse a transformers configuration whose model would be far larger than the files beside it, before it is built.

    Somebody else wrote the configuration. One number in it can make this process build layers until memory is
    exhausted. Names on a hub are not checked.

    Args:
        who: Name of the class that reads the configuration, for the error.
        folder: Folder or GGUF file of the model.
        config: Its configuration.
        kind: Class of the model, or an auto class.
        subfolder: Place of the model in a pipeline's folder.

    Raises:
        ConfigurationError: With the number of layers or parameters, and the number of bytes.
    """
    place = Path(folder or "", subfolder or "").expanduser()
    if not folder or not place.exists():
        return
    files = [*place.glob("*.safetensors")] if place.is_dir() else [place]
    stored = sum(file.stat().st_size for file in files)
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    numbers = [getattr(part, "num_hidden_layers", 0) for part in parts]
    asked = max((number for number in numbers if isinstance(number, int)), default=0)
    what = "layers"
    excess = asked > max(_LAYERS, stored // _LAYER_BYTES)
    if not excess:
        # A model that cannot be built raises its own error when it is built with weights.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
            network = from_config(kind, copy.deepcopy(config))
            asked = sum(parameter.numel() for parameter in network.parameters())
            what = "parameters"
            excess = asked > max(_PARAMETERS, stored * _PER_BYTE)
    if excess:
        raise ConfigurationError(
            f"{who}: the configuration in {place} asks for {asked:,} {what}, and its files of weights have "
            f"{stored:,} bytes: they do not belong together"
        )

"""Configurations of peft's methods: the supported methods, checks of a user's options, and peft's errors."""

import copy
import enum
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from lit_efficient.errors import ConfigurationError, check_number, did_you_mean
from lit_efficient.internals.import_noise import silence_imports

# What peft raises for a network or option that it does not support; the warning is made an error.
_ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    RuntimeError,
    KeyError,
    ImportError,
    RuntimeWarning,
)
_NEEDS_PEFT_MODEL = {  # options that have no effect, or not the whole one, without peft's own model
    "use_asa": "requires a step of peft's own model",
    "alora_invocation_tokens": "requires peft's own model, which searches for these tokens to activate the adapter",
    "monteclora_config": "requires a term in the loss that peft's own model computes",
}


def methods() -> dict[str, Any]:
    """Return the configuration classes of the supported methods, by peft's names.

    Methods that add no layers to a network (prompts) and methods whose model has its own forward are not supported.
    """
    silence_imports()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    found = {}
    for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items():
        if isinstance(tuner, type) and issubclass(tuner, BaseTuner) and tuner.forward is BaseTuner.forward:
            found[str(kind.value)] = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    return found


def peft_config(options: Mapping[str, Any]) -> Any:
    """Return peft's configuration object for training.

    Args:
        options: ``peft_type``, and fields of its configuration class.

    Raises:
        ConfigurationError: If the method is not one of :func:`methods`, if it has no such field, or if peft itself
            rejects a value.
    """
    known = methods()
    kind = str(options.get("peft_type", "")).upper()
    if kind not in known:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        if kind in {one.value for one in PEFT_TYPE_TO_CONFIG_MAPPING}:
            raise ConfigurationError(
                f"PeftAdapter: peft_type {kind} requires peft's own model around the network, because it has prompts "
                f"or its own forward, and is not supported. Use one of {', '.join(known)}"
            )
        raise ConfigurationError(
            f"PeftAdapter: peft has no peft_type {options.get('peft_type')!r}{did_you_mean(kind, known)} "
            f"({', '.join(known)})"
        )
    names = [one.name for one in fields(known[kind])]
    for name in options:
        if name not in names:
            near = did_you_mean(name, names)
            raise ConfigurationError(f"PeftAdapter: {kind} has no option {name!r}{near} ({', '.join(names)})")
    for one in fields(known[kind]):
        if one.name in options and type(one.default) in (int, float):  # peft does not check the types of numbers
            above = 0 if "alpha" in one.name else None
            null = any(word in str(one.type) for word in ("None", "Optional"))
            check_number("PeftAdapter", f"config.{one.name}", options[one.name], above=above, null=null)
    rest = {name: value for name, value in options.items() if name not in ("peft_type", "inference_mode")}
    try:
        config = known[kind](**copy.deepcopy(rest), inference_mode=False)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"PeftAdapter: peft rejects the options of {kind}: {error}") from error
    for name, why in _NEEDS_PEFT_MODEL.items():
        if getattr(config, name, None):
            raise ConfigurationError(f"PeftAdapter: {name} of {kind} {why}. Leave it out")
    start = getattr(config, "init_lora_weights", None)
    if start in ("eva", "lora_ga"):
        raise ConfigurationError(
            f"PeftAdapter: init_lora_weights={start!r} of {kind} requires a function of peft that reads batches. Call "
            "it in a program of your own, save the adapter, and name its folder in start_from"
        )
    return config


def config_options(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration object that differ from their defaults, as primitives.

    Args:
        config: Configuration object of peft. A mapping is converted to primitives as it is.
    """
    if isinstance(config, Mapping):
        return {str(key): _primitive(value) for key, value in config.items()}
    given = {name: _primitive(value) for name, value in config.to_dict().items()}
    usual: dict[str, object] = {}
    for one in fields(config):
        usual[one.name] = one.default
        if one.default_factory is not MISSING:
            usual[one.name] = one.default_factory()
    usual["peft_version"] = given.get("peft_version")  # left out, as the version that writes the file adds its own
    kept = {name: value for name, value in given.items() if name in usual and value != usual[name]}
    return kept | {"peft_type": given["peft_type"]}


def _primitive(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _primitive(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_primitive(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_primitive, value))
    return value


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Context that converts errors of peft into a ConfigurationError, which says that peft cannot do ``what``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            # peft would adapt the other targets alone.
            warnings.filterwarnings("error", message=r"target_\w+=.* were set but no")
            yield
    except _ERRORS as error:
        said = " ".join(str(error).split())[:400].replace("Target modules", "target_modules")
        if error.args == ("model_type",):
            said = "target_modules must be given for a network that peft does not know"
        raise ConfigurationError(f"PeftAdapter: peft cannot {what}: {said}") from error

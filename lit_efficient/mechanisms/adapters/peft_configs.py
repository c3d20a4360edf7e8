"""The configurations of peft's methods: which there are is asked of peft, those of a user are checked by it."""

import copy
import enum
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from lit_efficient.errors import ConfigurationError, check_number, did_you_mean
from lit_efficient.internals.import_noise import silence_imports

_BEYOND = {  # options of which a layer alone does nothing, or not all
    "use_asa": "is a step of peft's own model",
    "alora_invocation_tokens": "is looked for by peft's own model, and without it the adapter never takes part",
    "monteclora_config": "needs a term in the loss that peft's own model gives",
}


def methods() -> dict[str, Any]:
    """The configuration classes of the methods that can be used here, by peft's names for them.

    Not among them is what peft puts into no network (prompts), and what peft's own model does in its forward.
    """
    silence_imports()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    found = {}
    for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items():
        own = isinstance(tuner, type) and issubclass(tuner, BaseTuner) and tuner.forward is BaseTuner.forward
        if own:
            found[str(kind.value)] = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    return found


def peft_config(options: Mapping[str, Any]) -> Any:
    """Peft's configuration object, to train with, of its fields and ``peft_type``.

    Raises:
        ConfigurationError: For a method that is not among :func:`methods`, a field that it does not have, and what
            peft itself refuses.
    """
    known = methods()
    kind = str(options.get("peft_type", "")).upper()
    if kind not in known:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        if kind in {one.value for one in PEFT_TYPE_TO_CONFIG_MAPPING}:
            raise ConfigurationError(
                f"PeftAdapter: peft_type {kind} needs peft's own model around the network (it has prompts or a "
                f"forward of its own), which a LightningModule is not; those without are {', '.join(known)}"
            )
        raise ConfigurationError(
            f"PeftAdapter: peft has no peft_type {options.get('peft_type')!r}{did_you_mean(kind, known)} "
            f"({', '.join(known)})"
        )
    names = [one.name for one in fields(known[kind])]
    if odd := [name for name in options if name not in names]:
        near = did_you_mean(odd[0], names)
        raise ConfigurationError(f"PeftAdapter: {kind} has no option {odd[0]!r}{near} ({', '.join(names)})")
    for one in fields(known[kind]):
        if one.name in options and type(one.default) in (int, float):  # which peft computes with, whatever it is
            above = 0 if "alpha" in one.name else None
            null = any(word in str(one.type) for word in ("None", "Optional"))
            check_number("PeftAdapter", f"config.{one.name}", options[one.name], above=above, null=null)
    rest = {name: value for name, value in options.items() if name not in ("peft_type", "inference_mode")}
    try:
        config = known[kind](**copy.deepcopy(rest), inference_mode=False)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"PeftAdapter: peft refuses the options of {kind}: {error}") from error
    for name, why in _BEYOND.items():
        if getattr(config, name, None):
            raise ConfigurationError(f"PeftAdapter: {name} of {kind} {why}; leave it out")
    start = getattr(config, "init_lora_weights", None)
    if start in ("eva", "lora_ga"):
        raise ConfigurationError(
            f"PeftAdapter: init_lora_weights {start!r} of {kind} is made from batches by a function of peft's; without "
            "it peft starts as plain LoRA: save what it made, and name that folder in start_from"
        )
    return config


def config_options(config: Any) -> dict[str, Any]:
    """The fields of a configuration object that are not at their defaults, as primitives; those of a dict as given."""
    if isinstance(config, Mapping):
        return {str(key): _primitive(value) for key, value in config.items()}
    given = {name: _primitive(value) for name, value in config.to_dict().items()}
    usual: dict[str, Any] = {}
    for one in fields(config):
        usual[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
    usual["peft_version"] = given.get("peft_version")  # of whoever writes it
    kept = {name: value for name, value in given.items() if name in usual and value != usual[name]}
    return kept | {"peft_type": given["peft_type"]}


def _primitive(value: Any) -> Any:
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
    """Turn what peft raises into a refusal."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            yield
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError, KeyError, ImportError) as error:
        said = " ".join(str(error).split())[:400].replace("Target modules", "target_modules")
        if error.args == ("model_type",):
            said = "target_modules must be given for networks that it does not know"
        raise ConfigurationError(f"PeftAdapter: peft cannot {what}: {said}") from error

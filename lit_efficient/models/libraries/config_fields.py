"""What is wrong with fields of another package's configuration that this package takes, or fails on without a name."""

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lit_efficient.errors import ConfigurationError, LitEfficientError, did_you_mean, is_out_of_memory, refusal

_MOST = 2**32


@contextlib.contextmanager
def read_by_others(said: str, fields: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Put ``said`` before what another package raises over files or fields: each of its models fails in its own way.

    Want of memory, and of weights on the meta device, stays what it is.

    Raises:
        ConfigurationError: With the reason, and those of ``fields`` that may be it.
    """
    try:
        yield
    except Exception as error:
        weightless = isinstance(error, RuntimeError) and torch.get_default_device().type == "meta"
        if weightless or isinstance(error, LitEfficientError) or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        plain = reason if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {reason}"
        raise ConfigurationError(f"{said}: {plain}{unusual(fields or {})}") from error


def check_values(owner: str, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse what is no number, numbers below 0 where the default is above it, and whole ones that are no size.

    Raises:
        ConfigurationError: Naming the field.
    """
    for name, value in fields.items():
        default = defaults.get(name)
        least = isinstance(default, int | float) and default > 0
        if isinstance(value, int | float) and (math.isnan(value) or (least and value < 0)):
            raise refusal(owner, f"config_fields.{name}", "a number of at least 0" if least else "a number", value)
        if isinstance(value, int) and value >= _MOST:  # layers, one by one, would be made for ever
            raise refusal(owner, f"config_fields.{name}", f"below {_MOST}", value)


def check_names(owner: str, fields: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Refuse fields that ``kind`` does not have.

    Raises:
        ConfigurationError: Naming the first, and those that it may be meant for.
    """
    known = set(known)
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=3)
        raise ConfigurationError(
            f"{owner}: config_fields has {unknown!r}, which is no field of {kind}"
            f"{'; near ones: ' + ', '.join(near) if near else ''}."
        )


def meant(name: str, fields: Mapping[str, Any] | None) -> str:
    """What to say behind the lack of a field, where another may be meant for it."""
    return next((f": {one!r}{near}" for one in fields or {} if (near := did_you_mean(one, [name]))), "")


def unusual(fields: Mapping[str, Any]) -> str:
    """The fields whose values few networks can have, in brackets behind a message; '' where there are none."""
    odd = {
        name: value
        for name, value in fields.items()
        if (isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < _MOST)
        or (isinstance(value, list | tuple) and (not value or unusual(dict(enumerate(value)))))  # type: ignore[arg-type]
    }
    return f" ({', '.join(f'{name}: {value}' for name, value in odd.items())})" if odd else ""


def check_whole(owner: str, model: nn.Module, fields: Mapping[str, Any]) -> None:
    """Refuse a network with weights of no elements.

    Raises:
        ConfigurationError: Naming the first such weight, and the fields that may be why.
    """
    empty = next((name for name, p in model.named_parameters() if p.numel() == 0 and unusual(fields)), None)
    if empty is not None:
        raise ConfigurationError(
            f"{owner}: config_fields make a {type(model).__name__} whose {empty} is empty{unusual(fields)}"
        )

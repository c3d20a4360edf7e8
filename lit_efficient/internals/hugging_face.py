"""Attributes of transformers', diffusers' and datasets' objects that have no public name.

Checked with transformers 5.23, diffusers 0.42 and datasets 5.2.
"""

from typing import Any

from torch import nn


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Class names of a diffusers model's repeated blocks: ``_repeated_blocks``."""
    return tuple(getattr(module, "_repeated_blocks", None) or ())


def attention_of(config: Any) -> str:
    """The attention that a transformers model uses: ``config._attn_implementation``."""
    return str(config._attn_implementation)


def from_config(kind: Any, config: Any, **options: Any) -> Any:
    """A transformers model with random weights: ``from_config`` of the auto classes, ``_from_config`` of all others."""
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, **options)


def fingerprint(dataset: Any) -> str:
    """The hash of what made a data set: ``datasets.Dataset._fingerprint``."""
    return str(dataset._fingerprint)

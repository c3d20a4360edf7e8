"""What the contract tests must know of a technique; ``ROW`` in its own test file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lit_efficient import Technique
from lit_efficient.testing import Run
from tests.support import Net


@dataclass(frozen=True)
class Row:
    """How to test one technique on the toy of :mod:`lit_efficient.testing`.

    Args:
        make: Builds the technique at a setting that visibly changes the toy's training.
        effect: Asserts what it is for, of a run that it took part in (:mod:`tests.contract.effects`).
        neutral: Builds it at a setting under which training must equal plain Lightning bit for bit; ``None`` where the
            technique has no such setting.
        changes: Whether ``make`` changes the weights that a short run ends with.
        shadows: Whether evaluation uses other weights than the module's own.
        repacks: Whether a weight has another shape afterwards, under its old name.
        trainer: Arguments that its trainer needs.
        network: What the toy is made of; another one than the usual takes its place in all sets with the technique.
        beside: How to build it beside another technique that excludes the setting of ``make``.
        convolution: Whether the network needs a convolution, whatever else it is made of.
        instance_norm: Whether the network needs a convolution before an instance norm, whatever else it is made of.
        experts: Whether the network needs experts of transformers, whatever else it is made of.
        bfloat16: Whether the network needs a weight in bfloat16, whatever else it is made of.
    """

    make: Callable[[], Technique]
    effect: Callable[[Run], None]
    neutral: Callable[[], Technique] | None = None
    changes: bool = True
    shadows: bool = False
    repacks: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    network: type[nn.Module] = Net
    beside: dict[str, Callable[[], Technique]] = field(default_factory=dict)
    convolution: bool = False
    experts: bool = False
    bfloat16: bool = False
    instance_norm: bool = False

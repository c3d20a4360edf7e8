"""The table that drives the contract tests: one row a technique. A public technique without a row fails the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lit_efficient import IA3, LoRA, LowBitOptimizer, QuantizeBase, SNRWeighting, StochasticDepth, Technique


@dataclass(frozen=True)
class Case:
    """How to test one technique on the toy of :mod:`tests.support`.

    Args:
        make: Builds the technique at a setting that visibly changes the toy's training.
        neutral: Builds it at a setting under which training must equal plain Lightning bit for bit; ``None`` where the
            technique has no such setting.
        changes: Whether ``make`` changes the trained weights of a run of four steps.
        repacks: Whether a weight has another shape afterwards, under its old name.
        trainer: Arguments that its trainer needs.
    """

    make: Callable[[], Technique]
    neutral: Callable[[], Technique] | None
    changes: bool = True
    repacks: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "IA3": Case(lambda: IA3(targets=["up"], feedforward=["down"]), neutral=None),
    "LoRA": Case(lambda: LoRA(rank=2, variant="dora", lr_ratio=4.0), neutral=None),
    "LowBitOptimizer": Case(lambda: LowBitOptimizer(min_size=0), neutral=None),
    "QuantizeBase": Case(QuantizeBase, neutral=None, repacks=True),
    "SNRWeighting": Case(lambda: SNRWeighting(gamma=1.0), neutral=lambda: SNRWeighting(gamma=1e30, prediction="eps")),
    "StochasticDepth": Case(lambda: StochasticDepth(rate=0.7), neutral=lambda: StochasticDepth(rate=0.0)),
}

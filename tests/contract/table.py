"""The table that drives the contract tests: one row a technique. A public technique without a row fails the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lit_efficient
from lit_efficient import (
    ConflictError,
    ExactResume,
    LowBitOptimizer,
    ScheduleFree,
    SNRWeighting,
    StochasticDepth,
    Technique,
)
from lit_efficient.technique import check_conflicts


class OffloadOptimizer(lit_efficient.OffloadOptimizer):
    """Streams on the CPU, too, where it saves nothing: its steps must equal plain ones anywhere."""

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse nothing."""


@dataclass(frozen=True)
class Case:
    """How to test one technique on the toy of :mod:`tests.support`.

    Args:
        make: Builds the technique at a setting that visibly changes the toy's training.
        neutral: Builds it at a setting under which training must equal plain Lightning bit for bit; ``None`` where the
            technique has no such setting.
        changes: Whether ``make`` changes the trained weights of a run of four steps.
        trainer: Arguments that its trainer needs.
    """

    make: Callable[[], Technique]
    neutral: Callable[[], Technique] | None
    changes: bool = True
    trainer: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "ExactResume": Case(lambda: ExactResume(0), neutral=lambda: ExactResume(0), changes=False),
    "LowBitOptimizer": Case(lambda: LowBitOptimizer(min_size=0), neutral=None),
    "OffloadOptimizer": Case(OffloadOptimizer, neutral=OffloadOptimizer, changes=False),
    "ScheduleFree": Case(lambda: ScheduleFree(warmup_steps=2), neutral=None),
    "SNRWeighting": Case(lambda: SNRWeighting(gamma=1.0), neutral=lambda: SNRWeighting(gamma=1e30, prediction="eps")),
    "StochasticDepth": Case(lambda: StochasticDepth(rate=0.7), neutral=lambda: StochasticDepth(rate=0.0)),
}


def _together() -> tuple[str, ...]:
    """As many techniques as go together, in the order of their names."""
    chosen: list[str] = []
    for name in sorted(CASES):
        try:
            check_conflicts([CASES[other].make() for other in (*chosen, name)])
        except ConflictError:
            continue
        chosen.append(name)
    return tuple(chosen)


TOGETHER = _together()

"""The table that drives the contract tests: one row a technique. A public technique without a row fails the suite."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lit_efficient
from lit_efficient import (
    EMA,
    IA3,
    ActivationCheckpointing,
    ChannelsLast,
    CheckpointAverage,
    ChunkedCrossEntropy,
    Compile,
    ConflictError,
    ExactResume,
    FeatureMatching,
    GradualUnfreezing,
    HiddenAlignment,
    LatentAlignment,
    LoRA,
    LowBitOptimizer,
    LRFinder,
    MaxBatchSize,
    PowerEMA,
    PrefixTuning,
    QuantizeBase,
    ReplaceHead,
    ScheduleFree,
    SNRWeighting,
    StochasticDepth,
    Technique,
    TokenWeightedAccumulation,
)
from lit_efficient.declaration import check_conflicts
from tests.support import WIDTH, AttentionNet, Net, TokenAttentionNet, TokenNet, convolved


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
        shadows: Whether evaluation uses other weights than the module's own.
        repacks: Whether a weight has another shape afterwards, under its old name.
        trainer: Arguments that its trainer needs.
        network: What the toy is made of; another one than the usual takes its place in all sets with the technique.
        beside: How to build it beside another technique that excludes the setting of ``make``.
        convolution: Whether the network needs a convolution, whatever else it is made of.
    """

    make: Callable[[], Technique]
    neutral: Callable[[], Technique] | None
    changes: bool = True
    shadows: bool = False
    repacks: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    network: type[nn.Module] = Net
    beside: dict[str, Callable[[], Technique]] = field(default_factory=dict)
    convolution: bool = False


def _power_ema() -> PowerEMA:
    return PowerEMA(dirpath=str(Path(tempfile.gettempdir()) / "lit_efficient_snapshots"))


def _lr_finder(apply: bool = True) -> LRFinder:
    return LRFinder(min_lr=1e-3, max_lr=3.0, num_steps=16, early_stop_threshold=None, apply=apply)


def _teacher(width: int = 12) -> nn.Module:
    """A frozen network of the toy's input, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())


CASES: dict[str, Case] = {
    "ActivationCheckpointing": Case(
        lambda: ActivationCheckpointing(every=2), neutral=ActivationCheckpointing, changes=False
    ),
    "ChannelsLast": Case(ChannelsLast, neutral=None, convolution=True),  # the same values, rounded in another order
    "Compile": Case(
        lambda: Compile(backend="eager"),
        neutral=lambda: Compile(backend="aot_eager"),
        changes=False,
        beside={"ActivationCheckpointing": lambda: Compile(backend="aot_eager")},  # see test_compile.py
    ),
    "ExactResume": Case(lambda: ExactResume(0), neutral=lambda: ExactResume(0), changes=False),
    "LowBitOptimizer": Case(lambda: LowBitOptimizer(min_size=0), neutral=None),
    "LRFinder": Case(_lr_finder, neutral=lambda: _lr_finder(apply=False)),
    # half the batch, accumulated: the same gradient up to rounding
    "MaxBatchSize": Case(lambda: MaxBatchSize(max_size=2), neutral=MaxBatchSize),
    "OffloadOptimizer": Case(OffloadOptimizer, neutral=OffloadOptimizer, changes=False),
    "ScheduleFree": Case(lambda: ScheduleFree(warmup_steps=2), neutral=None),
    "CheckpointAverage": Case(
        lambda: CheckpointAverage(last_k=3, every_n_steps=1),
        lambda: CheckpointAverage(last_k=1, every_n_steps=1),
        changes=False,
        shadows=True,
    ),
    "ChunkedCrossEntropy": Case(lambda: ChunkedCrossEntropy(chunk_size=3, z_loss=0.1), neutral=None, network=TokenNet),
    "EMA": Case(lambda: EMA(decay=0.8), lambda: EMA(start_step=1_000), changes=False, shadows=True),
    "PowerEMA": Case(_power_ema, neutral=_power_ema, changes=False),
    "FeatureMatching": Case(
        lambda: FeatureMatching("net", _teacher(), {r"blocks\.1": ""}, stop_at=6),
        neutral=lambda: FeatureMatching("net", _teacher(WIDTH), {r"blocks\.1": ""}, weight=0.0, projection="none"),
    ),
    "HiddenAlignment": Case(
        lambda: HiddenAlignment(2, _teacher(), hidden=8, source="0"),
        neutral=lambda: HiddenAlignment(2, _teacher(WIDTH), weight=0.0, projection="none", source="0"),
    ),
    "LatentAlignment": Case(
        lambda: LatentAlignment(_teacher(), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0"),
        neutral=None,
    ),
    "IA3": Case(lambda: IA3(targets=["up"], feedforward=["down"]), neutral=None),
    "LoRA": Case(lambda: LoRA(rank=2, variant="dora", lr_ratio=4.0), neutral=None),
    "PrefixTuning": Case(lambda: PrefixTuning(3, init_tokens=[1, 5]), neutral=None, network=AttentionNet),
    "GradualUnfreezing": Case(
        lambda: GradualUnfreezing(every_n_steps=1), neutral=lambda: GradualUnfreezing([".*"], every_n_steps=1)
    ),
    "ReplaceHead": Case(lambda: ReplaceHead(16), neutral=None),
    "QuantizeBase": Case(QuantizeBase, neutral=None, repacks=True),
    "SNRWeighting": Case(lambda: SNRWeighting(gamma=1.0), neutral=lambda: SNRWeighting(gamma=1e30, prediction="eps")),
    "StochasticDepth": Case(lambda: StochasticDepth(rate=0.7), neutral=lambda: StochasticDepth(rate=0.0)),
    "TokenWeightedAccumulation": Case(TokenWeightedAccumulation, neutral=TokenWeightedAccumulation, changes=False),
}


def make_all(*names: str) -> list[Technique]:
    """The named techniques, each at a setting that goes with the others."""
    return [
        next((CASES[name].beside[other] for other in names if other in CASES[name].beside), CASES[name].make)()
        for name in names
    ]


def network_of(*names: str) -> type[nn.Module]:
    """The network that all the named techniques can act on."""
    needed = {CASES[name].network for name in names} - {Net}
    network = TokenAttentionNet if len(needed) > 1 else next(iter(needed), Net)
    return convolved(network) if any(CASES[name].convolution for name in names) else network


def _together() -> tuple[str, ...]:
    """As many techniques as go together, in the order of their names."""
    chosen: list[str] = []
    for name in sorted(CASES):
        try:
            check_conflicts(make_all(*chosen, name))
        except ConflictError:
            continue
        chosen.append(name)
    return tuple(chosen)


TOGETHER = _together()
# Compiling takes seconds in each run: tests of many runs do it in few of them.
UNCOMPILED = tuple(name for name in TOGETHER if name != "Compile")

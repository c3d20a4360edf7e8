"""The table that drives the contract tests: one row a technique, here or in its own test file, as ``ROW``.

A public technique without a row fails the suite.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
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
    Technique,
    TokenWeightedAccumulation,
)
from lit_efficient.declaration import Declaration, Hooks, check_conflicts
from lit_efficient.testing import Case, Run
from tests.contract import effects
from tests.contract.row import Row
from tests.support import (
    WIDTH,
    AttentionNet,
    Net,
    PaddedNet,
    TokenAttentionNet,
    TokenNet,
    convolved,
    lowered,
    normed,
    routed,
)


class OffloadOptimizer(lit_efficient.OffloadOptimizer):
    """Streams on the CPU, too, where it saves nothing: its steps must equal plain ones anywhere."""

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse nothing."""


def _compile(backend: str) -> Compile:
    effects.GRAPHS.clear()
    return Compile(backend=backend)


def _power_ema() -> PowerEMA:
    return PowerEMA(sigma_rels=[0.1, 0.25], dirpath=str(effects.SNAPSHOTS))


def _lr_finder(apply: bool = True, max_lr: float = 3.0, num_steps: int = 12) -> LRFinder:
    return LRFinder(min_lr=1e-3, max_lr=max_lr, num_steps=num_steps, apply=apply)


class Teacher(nn.Sequential):
    """Takes shorter rows, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [B, at most WIDTH]."""
        return super().forward(nn.functional.pad(x, (0, WIDTH - x.shape[-1])))


def _teacher(width: int = 12) -> nn.Module:
    """A frozen network of the toy's input, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Teacher(nn.Linear(WIDTH, width), nn.Tanh())


def _teacher_of_tokens() -> nn.Module:
    """One that gives a vector for each of the numbers, which are tokens of `AttentionNet`."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Sequential(nn.Unflatten(-1, (-1, 1)), nn.Linear(1, 12)), nn.Tanh())


# Which make the toy's network one of tokens.
_TOKENS = (
    "MixtureOfDepths",
    "MixtureOfExperts",
    "MultiTokenPrediction",
    "NEFTune",
    "PrefixTuning",
    "TiledMLP",
    "TokenRouting",
    "WidthTransfer",
)

CASES: dict[str, Row] = {
    "ActivationCheckpointing": Row(
        lambda: ActivationCheckpointing(every=2), effects.recomputes, ActivationCheckpointing, changes=False
    ),
    # the same values, rounded in another order
    "ChannelsLast": Row(ChannelsLast, effects.channels_are_last, convolution=True),
    "CheckpointAverage": Row(
        lambda: CheckpointAverage(last_k=3, every_n_steps=1),
        effects.evaluates_the_mean_of_the_last_three,
        lambda: CheckpointAverage(last_k=1, every_n_steps=1),
        changes=False,
        shadows=True,
    ),
    "ChunkedCrossEntropy": Row(
        lambda: ChunkedCrossEntropy(chunk_size=3, z_loss=0.1), effects.logits_are_never_whole, network=TokenNet
    ),
    "Compile": Row(
        lambda: _compile("counted"),
        effects.is_compiled,
        lambda: Compile(backend="aot_eager"),
        changes=False,
        beside={"ActivationCheckpointing": lambda: _compile("aot_counted")},  # see test_compile.py
    ),
    "EMA": Row(
        lambda: EMA(decay=0.8),
        effects.evaluates_the_moving_average,
        lambda: EMA(start_step=1_000),
        changes=False,
        shadows=True,
    ),
    "ExactResume": Row(lambda: ExactResume(0), effects.draws_follow_the_batch, lambda: ExactResume(0), changes=False),
    "FeatureMatching": Row(
        lambda: FeatureMatching("net", _teacher(), {r"blocks\.1": ""}, stop_at=3),
        effects.matches_features_until_it_stops,
        lambda: FeatureMatching("net", _teacher(WIDTH), {r"blocks\.1": ""}, weight=0.0, projection="none"),
        beside={"BatchRamp": lambda: FeatureMatching("net", _teacher(), {r"blocks\.1": ""}, stop_at=4)},  # more steps
    ),
    "GradualUnfreezing": Row(
        lambda: GradualUnfreezing(every_n_steps=1),
        effects.thaws_from_the_head_down,
        lambda: GradualUnfreezing([".*"], every_n_steps=1),
    ),
    "HiddenAlignment": Row(
        lambda: HiddenAlignment(2, _teacher(), hidden=6, source="0"),
        effects.aligns_hidden_tokens,
        lambda: HiddenAlignment(2, _teacher(WIDTH), weight=0.0, projection="none", source="0"),
        beside=dict.fromkeys(_TOKENS, lambda: HiddenAlignment(2, _teacher_of_tokens(), hidden=6, source="0")),
    ),
    "IA3": Row(
        lambda: IA3(targets=["up"], feedforward=["down"]),
        effects.trains_factors_alone,
        beside={"MixtureOfExperts": lambda: IA3(targets=["value"], feedforward=["attention.out"])},  # linear layers
    ),
    "LatentAlignment": Row(
        lambda: LatentAlignment(_teacher(), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0"),
        effects.aligns_latents,
        beside=dict.fromkeys(
            _TOKENS,
            lambda: LatentAlignment(_teacher_of_tokens(), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0"),
        ),
    ),
    "LoRA": Row(
        lambda: LoRA(rank=2, variant="dora", lr_ratio=4.0),
        effects.trains_adapters_alone,
        beside={"ScheduleFree": lambda: LoRA(rank=2, variant="dora")},
    ),
    "LowBitOptimizer": Row(
        lambda: LowBitOptimizer(min_size=0),
        effects.states_have_one_byte,
        beside=dict.fromkeys(  # whose network has an embedding
            ("MixtureOfDepths", "MixtureOfExperts"), lambda: LowBitOptimizer(min_size=0, keep_32bit=())
        ),
    ),
    "LRFinder": Row(
        _lr_finder,
        effects.rate_is_the_suggested_one,
        lambda: _lr_finder(apply=False),
        # LabelSmoothing's best loss is a number, which logits that explode have no digits for. The few parameters of a
        # prefix improve up to high rates. NEFTune's noise on the loss and WidthTransfer's small rates need more steps.
        beside={
            "LabelSmoothing": lambda: _lr_finder(max_lr=0.1),
            "NEFTune": lambda: _lr_finder(num_steps=60),
            "WidthTransfer": lambda: _lr_finder(num_steps=60),
            "PrefixTuning": lambda: _lr_finder(max_lr=300.0),
        },
    ),
    # half the batch, accumulated: the same gradient up to rounding
    "MaxBatchSize": Row(lambda: MaxBatchSize(max_size=2), effects.batches_are_smaller, MaxBatchSize),
    "OffloadOptimizer": Row(OffloadOptimizer, effects.states_are_streamed, OffloadOptimizer, changes=False),
    "PowerEMA": Row(_power_ema, effects.averages_of_each_width, _power_ema, changes=False),
    "PrefixTuning": Row(
        lambda: PrefixTuning(3, init_tokens=[1, 5]), effects.trains_the_prefix_alone, network=AttentionNet
    ),
    "QuantizeBase": Row(QuantizeBase, effects.base_is_stored_in_codes, repacks=True),
    "ReplaceHead": Row(
        lambda: ReplaceHead(16),
        effects.starts_anew_at_the_head,
        beside={"ChunkedCrossEntropy": lambda: ReplaceHead(20)},  # a size that nothing else has
    ),
    "ScheduleFree": Row(lambda: ScheduleFree(warmup_steps=2), effects.ends_with_the_average_of_its_iterates),
    "SNRWeighting": Row(
        lambda: SNRWeighting(gamma=1.0),
        effects.samples_are_weighed,
        lambda: SNRWeighting(gamma=1e30, prediction="eps"),
    ),
    "TokenWeightedAccumulation": Row(
        TokenWeightedAccumulation,
        effects.micro_batches_weigh_by_their_tokens,
        TokenWeightedAccumulation,
        trainer={"accumulate_grad_batches": 2},
    ),
}


def _elsewhere() -> dict[str, Row]:
    """The rows of all other public techniques, from their own test files."""
    rows = {}
    for name in lit_efficient.PUBLIC.keys() - CASES:
        kind = getattr(lit_efficient, name)
        if (
            inspect.isclass(kind)
            and issubclass(kind, Declaration)
            and kind is not Technique
            and Hooks not in kind.__bases__
        ):
            slot, file = lit_efficient.PUBLIC[name].split(".")
            module = import_module(f"tests.{slot}.test_{file}")
            assert hasattr(module, "ROW"), f"tests/{slot}/test_{file}.py needs a ROW: see tests/contract/row.py"
            rows[name] = module.ROW
    return rows


CASES |= _elsewhere()
NAMES = sorted(CASES)


def make_all(*names: str) -> list[Technique]:
    """The named techniques, each at a setting that goes with the others."""
    return [make() for make in _makers(*names)]


def _makers(*names: str) -> list[Callable[[], Technique]]:
    return [
        next((CASES[name].beside[other] for other in names if other in CASES[name].beside), CASES[name].make)
        for name in names
    ]


@functools.cache
def _example(make: Callable[[], Technique]) -> Technique:
    return make()


def network_of(*names: str) -> type[nn.Module]:
    """The network that all the named techniques can act on."""
    needed = {CASES[name].network for name in names} - {Net}
    needed = needed - {PaddedNet} or needed  # the others take shorter rows, too
    network: Any = next(iter(needed), Net)
    if len(needed) > 1:
        network = next((part.with_attention for part in needed if hasattr(part, "with_attention")), TokenAttentionNet)
    network = convolved(network) if any(CASES[name].convolution for name in names) else network
    network = routed(network) if any(CASES[name].experts for name in names) else network
    network = normed(network) if any(CASES[name].instance_norm for name in names) else network
    return lowered(network) if any(CASES[name].bfloat16 for name in names) else network


def case(*names: str) -> Case:
    """The named techniques together, with the effects of all."""
    rows = [CASES[name] for name in names]

    def effect(run: Run) -> None:
        for row in rows:
            row.effect(run)

    neutral = rows[0].neutral if len(rows) == 1 else None
    return Case(
        lambda: make_all(*names),
        effect,
        None if neutral is None else lambda: [neutral()],
        changes=any(row.changes for row in rows),
        shadows=any(row.shadows for row in rows),
        repacks=any(row.repacks for row in rows) or {"ReplaceHead", "ChunkedCrossEntropy"} <= {*names},  # see above
        network=network_of(*names),
        trainer=(arguments := {key: value for row in rows for key, value in row.trainer.items()}),
        rows=8 * arguments.get("accumulate_grad_batches", 1),
    )


def allowed(*names: str) -> bool:
    """Whether no conflict is declared between them."""
    try:
        check_conflicts([_example(make) for make in _makers(*names)])  # thousands of sets are asked for
    except ConflictError:
        return False
    return True


def _together() -> tuple[str, ...]:
    """As many techniques as go together, in the order of their names; what is no callback comes last."""
    chosen: list[str] = []
    for name in sorted(NAMES, key=lambda name: not isinstance(CASES[name].make(), Technique)):
        network = CASES[name].network
        own = network is AttentionNet or hasattr(network, "with_attention")  # in whose place others would have another
        if name != "Compile" and not own and allowed(*chosen, name):
            chosen.append(name)
    return tuple(chosen)


TOGETHER = _together()
# Compiling takes seconds in each run of many techniques.
COMPILED = ("Compile", "LoRA", "MaxBatchSize", "StochasticDepth")

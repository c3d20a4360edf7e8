"""WeightClipping: what matches and trains stays within its bound, all else is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient import EMA, ConfigurationError, GradualUnfreezing, LoRA, WeightClipping
from lit_efficient.callbacks.weight_clipping import clip_weight_
from lit_efficient.testing import Case, Run
from tests.contract.row import Row
from tests.support import Toy, data, trainer

BOUND = 0.015625


def matched_weights_stay_within_the_bound(run: Run) -> None:
    """Those that the optimizer moves; averages of bounded weights may be rounded."""
    clipped = run.technique("WeightClipping")
    moved = {n for n, w in run.start.items() if not torch.equal(w, run.steps[-1].weights[n])}
    names = {name for name, _ in clipped._matches(run.module)} & moved
    assert names
    for step in run.steps[-1:]:
        assert all(step.weights[name].abs().max() <= BOUND * 1.01 for name in names)


ROW = Row(lambda: WeightClipping(BOUND, [".*"]), matched_weights_stay_within_the_bound, lambda: WeightClipping(1e30))


def fit(techniques: list[Any], module: Any = None, **arguments: Any) -> Run:
    return Case(lambda: [], lambda run: None).fit(
        techniques, module or Toy("configure_model"), saves=False, **arguments
    )


def test_only_what_matches_is_clamped_and_as_torch_clamps_it() -> None:
    run, plain = fit([WeightClipping(BOUND, [r"blocks\.\d+\.up", r"head\.bias"])]), fit([])
    for name, w in run.steps[0].weights.items():
        unclipped = plain.steps[0].weights[name]
        matches = ".up." in name or name.endswith("head.bias")
        assert torch.equal(w, unclipped.clamp(-BOUND, BOUND) if matches else unclipped)
        assert not matches or unclipped.abs().max() > BOUND
    assert run.reports["WeightClipping"].summary.startswith("9 tensors, ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bound_that_the_format_lacks_is_not_exceeded(dtype: torch.dtype) -> None:
    for bound in (0.1, 0.25):
        most = clip_weight_(torch.tensor([-1.0, 1.0], dtype=dtype), bound).double().abs().amax()
        assert bound * (1 - torch.finfo(dtype).eps) <= most <= bound


def test_beside_adapters_the_frozen_base_keeps_its_weights() -> None:
    run = fit([LoRA(rank=2), WeightClipping(1e-3, [".*lora.*"])])
    start, end = run.start, run.steps[-1].weights
    for name, w in end.items():
        if "lora" in name:
            assert w.abs().max() <= 1e-3
        else:
            assert torch.equal(w, start[name])
    with pytest.raises(ConfigurationError, match=r"WeightClipping: the pattern 'head.*weight' matches none of the"):
        fit([LoRA(rank=2, targets=["up"]), WeightClipping(1e-3, [r"head\.weight"])])


def test_what_thaws_later_is_clamped_from_then_on_and_averages_are_of_clamped_weights() -> None:
    ema = EMA(decay=0.5, warmup=None)
    run = fit([WeightClipping(BOUND, ["stem.weight"]), GradualUnfreezing(every_n_steps=1), ema], max_epochs=5)
    stem = [step.weights["net.stem.weight"] for step in run.steps]
    assert torch.equal(stem[0], run.start["net.stem.weight"])
    assert stem[-1].abs().max() <= BOUND < stem[0].abs().max()


def test_two_optimizers_by_hand() -> None:
    trainer([WeightClipping(BOUND)]).fit(module := Toy("configure_model", optimizers=2), data(), data())
    assert all(w.abs().max() <= BOUND for name, w in module.named_parameters() if name.endswith("weight"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound": 0}, "bound must be above 0, got 0"),
        ({"bound": 1.0, "targets": "weight"}, "targets must be a list of regular expressions, got 'weight'"),
        ({"bound": 1.0, "targets": []}, r"targets must be a list of regular expressions, got \[\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"WeightClipping: {message}"):
        WeightClipping(**arguments)


def test_a_pattern_that_matches_nothing_raises_before_training() -> None:
    with pytest.raises(ConfigurationError, match="WeightClipping: the pattern 'wieght' matches none of the"):
        trainer([WeightClipping(1.0, ["wieght"])]).fit(Toy(), data(), data())

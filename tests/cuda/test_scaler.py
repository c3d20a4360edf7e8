"""The gradient scaler of 16-mixed, without a GPU: a power of two changes nothing, and a skipped step is none."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lit_efficient import LRFinder, MaxBatchSize
from lit_efficient.testing import Toy, data, trainer, weights
from tests.contract.table import NAMES, allowed, case

# One refuses a scaler, whose factor it would have to know in the backward pass; the other is a precision itself.
WITHOUT = {"OptimizerInBackward", "Float8Precision"}
WITHOUT |= {"AdaptiveGradientClipping", "GradientClipping"}  # beside gradient_clip_val
WITHOUT |= {"LRFinder"}  # a trial with a step that the scaler skips finds another rate
WITHOUT |= {"SequenceLengthRamp"}  # of rows that it shortens no teacher has as many tokens


def groups() -> list[tuple[str, ...]]:
    """All techniques, as many as go together in each.

    Compiling many takes long, and IA3 trains so few parameters that not all effects of others show.
    """
    alone = ("Compile", "IA3")
    made: list[tuple[str, ...]] = []
    for name in NAMES:
        if name in {*alone, *WITHOUT}:
            continue
        fits = next((i for i, group in enumerate(made) if allowed(*group, name)), None)
        if fits is None:
            made.append((name,))
        else:
            made[fits] = (*made[fits], name)
    return [*((name,) for name in alone), *made]


class Scaled(MixedPrecision):
    """The scaler alone: what is computed in float32 must then be equal bit for bit."""

    def __init__(self, scale: float) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6))

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


class Watch(L.Callback):
    """The weights after each batch; the gradients of one overflow."""

    def __init__(self, overflow: int | None) -> None:
        self.overflow = overflow
        self.seen: list[dict[str, Tensor]] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.overflow:
            next(p.grad for p in pl_module.parameters() if p.grad is not None).fill_(float("inf"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(weights(pl_module))


def fit(names: tuple[str, ...], overflow: int | None, plugins: list[Any]) -> tuple[list[dict[str, Tensor]], Any]:
    about, watch = case(*names), Watch(overflow)
    arguments = {"plugins": plugins, "gradient_clip_val": 0.05, "max_epochs": 2, "limit_val_batches": 1}
    run = trainer([*about.make(), watch], **arguments, **about.trainer)
    torch.manual_seed(0)
    run.fit(about.toy(), data(about.rows), data())
    return watch.seen, run


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # after a step that the scaler has skipped
@pytest.mark.turns(4)
@pytest.mark.parametrize("names", groups(), ids=lambda names: f"{names[0]} and {len(names) - 1}")
def test_scaled_clipped_and_skipped_steps(names: tuple[str, ...]) -> None:
    skipped = 3 if {"TokenWeightedAccumulation", "MaxBatchSize"} & {*names} else 1  # the last batch of the second step
    plain, _ = fit(names, None, [])
    scaled, run = fit(names, skipped, [Scaled(2.0**20)])
    last = run.accumulate_grad_batches
    for before, after in zip(plain[: skipped - last + 1], scaled):
        for key, tensor in before.items():
            assert torch.equal(tensor, after[key]), key
    for key, tensor in scaled[skipped - 1].items():
        # The bias of a router follows the choices of a batch, whether or not its gradients overflow.
        assert torch.equal(tensor, scaled[skipped][key]) or key.endswith("router_bias"), key
    assert any(not torch.equal(tensor, scaled[-1][key]) for key, tensor in scaled[skipped].items())
    assert all(tensor.isfinite().all() for tensor in scaled[-1].values())
    assert run.precision_plugin.scaler.get_scale() == 2.0**19


class Loud(Toy):
    """Every step's gradients overflow."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * 1e6}


@pytest.mark.filterwarnings("ignore:LRFinder")  # no step is made, so no rate lowers the loss
@pytest.mark.parametrize("technique", [LRFinder, MaxBatchSize])
def test_trials_leave_the_scale_alone(technique: Any) -> None:
    """Each of their steps overflows, and would halve it."""
    scales: list[float] = []

    class Note(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())

    arguments = {"num_steps": 10, "apply": False} if technique is LRFinder else {"max_size": 4}
    run = trainer([technique(**arguments), Note()], plugins=[Scaled(2.0**127)], max_steps=2, limit_val_batches=1)
    with pytest.warns(UserWarning, match="lr_scheduler"):  # the scaler skips what torch's schedulers count
        run.fit(Loud(), data(), data())
    assert len(scales) > 2  # those of the trials come first
    assert scales[-2:] == [2.0**127, 2.0**126]

"""What is reported as set is read from the object that counts, and what overrides it is named."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch

from lit_efficient import (
    AdaptiveGradientClipping,
    BatchRamp,
    GradientClipping,
    InverseSquareRoot,
    MaxBatchSize,
    OptimizerSchedule,
    WarmupConstant,
    WarmupCosine,
)
from tests.support import Toy, data, trainer


class Louder(torch.optim.AdamW):
    """Multiply gradients in each step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(9)
        super().step()
        return loss


class Own(Toy):
    """Change a setting of the optimizer in ``optimizer_step``, or of the trainer before it."""

    sets: ClassVar[dict[str, Any]] = {}
    after = False  # of the optimizer's step
    raw = False  # step the optimizer without Lightning's wrapper
    optimizer: Any = torch.optim.AdamW
    schedule: Any = None
    clips = 1.0
    accumulates: int | None = None

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=1e-2, weight_decay=0.1)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.accumulates is not None:
            self.trainer.accumulate_grad_batches = self.accumulates

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.raw:
            optimizer_closure()
            optimizer.optimizer.step()
            return
        if self.after:
            optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group.update(self.sets)
        if not self.after:
            optimizer.step(closure=optimizer_closure)


class Clips(Own):
    def configure_gradient_clipping(self, optimizer: Any, *values: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.clips)


def said(module: Any, *callbacks: Any, **arguments: Any) -> list[str]:
    """Return the warnings of a run about settings that do not hold."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer([*callbacks], **{"max_steps": 4, "max_epochs": 2, **arguments}).fit(module, data(), data())
    words = ("should ", "sets it, too", "after they are clipped", "does not hold")
    return [str(one.message) for one in caught if any(word in str(one.message) for word in words)]


def with_attributes(module: Own, **attributes: Any) -> Own:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def schedule() -> OptimizerSchedule:
    return OptimizerSchedule(weight_decay=[0.1, 0.4], momentum=[0.8, 0.9], until=4)


@pytest.mark.parametrize(
    ("attributes", "callbacks", "arguments", "message"),
    [
        (
            {"sets": {"weight_decay": 0.7}},
            lambda: [schedule()],
            {},
            "step 1 should have weight_decay 0.1, but the optimizer has 0.7",
        ),
        (
            {"sets": {"betas": (0.5, 0.9)}},
            lambda: [schedule()],
            {},
            "step 1 should have betas 0.8, 0.999, but the optimizer has 0.5, 0.9",
        ),
        ({"raw": True}, lambda: [GradientClipping(max_norm=1e-3)], {}, "GradientClipping: step 1 should have clipped"),
        ({"raw": True}, lambda: [AdaptiveGradientClipping()], {}, "AdaptiveGradientClipping: step 1 should have clip"),
        ({"optimizer": Louder}, lambda: [GradientClipping(1e-3)], {}, "norm 0.001 after they are clipped, but Louder"),
        (
            {"clips": 5e-3},
            lambda: [schedule()],
            {"gradient_clip_val": 1e-3},
            "Trainer(gradient_clip_val=0.001) does not hold in the optimizer's step 1, whose gradients have 0.005",
        ),
        (
            {"accumulates": 1},
            lambda: [MaxBatchSize(max_size=2)],
            {},
            "MaxBatchSize: step 1 should accumulate 2 batches, but accumulate_grad_batches is 1",
        ),
        ({"schedule": lambda o: WarmupConstant(o, 2), "sets": {"lr": 0.03}}, list, {}, "has set the rate 0.01, but"),
        ({"schedule": lambda o: InverseSquareRoot(o, 2), "sets": {"lr": 0.03}}, list, {}, "but the optimizer has 0.03"),
        (
            {"schedule": lambda o: WarmupCosine(o, 9), "sets": {"lr": 0.03}, "after": True},
            list,
            {},
            "WarmupCosine: the schedule has set the rate",
        ),
    ],
)
def test_what_overrides_a_setting_is_named(attributes: Any, callbacks: Any, arguments: Any, message: str) -> None:
    plain = {name: value for name, value in attributes.items() if name == "schedule"}
    assert said(with_attributes(Own(), **plain), *callbacks(), **arguments) == []
    kind = Clips if "clips" in attributes else Own
    sentences = said(with_attributes(kind(), **attributes), *callbacks(), **arguments)
    assert sentences
    assert all(message in sentence for sentence in sentences), sentences


def test_a_clipping_of_the_module_that_keeps_the_limit_is_silent() -> None:
    assert said(with_attributes(Clips(), clips=1e-3), schedule(), gradient_clip_val=1e-3) == []


def test_an_accumulation_that_a_hook_sets_beside_a_ramp_is_named() -> None:
    class Sets(Own):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.accumulate_grad_batches = 4

    assert said(Own(), BatchRamp([1]), accumulate_grad_batches=2) == []
    (sentence,) = said(Sets(), BatchRamp([1]), accumulate_grad_batches=2, max_steps=1)
    assert "BatchRamp: step 0 should accumulate 1 batches, but accumulate_grad_batches is 4" in sentence

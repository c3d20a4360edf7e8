"""Techniques that change gradients act in the order of their phases, whatever the order of the trainer's list."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient import ConfigurationError, GradientClipping, GradientHooks, Phase, Report, SpikeGuard, Technique
from lit_efficient.testing import CHECKS, Case, Run, check_neutral
from tests.support import Toy, assert_equal, data, trainer, weights


class Changes(GradientHooks, Technique):
    """Notes the gradients that it gets, and changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def describe(self, module: nn.Module) -> Report:
        return Report(f"gradients are changed by {type(self).__name__}")

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
        for gradient in gradients.values():
            self.change(gradient)

    def change(self, gradient: Tensor) -> None:
        """Change one gradient in place."""


class Doubles(Changes):
    def change(self, gradient: Tensor) -> None:
        gradient.mul_(2)


class Shifts(Changes):
    def change(self, gradient: Tensor) -> None:
        gradient.add_(0.01)


class Judges(Changes):
    phase = Phase.GUARD


class Notes(Callback):
    """Notes the gradients before techniques act, and those that the optimizer gets."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.stepped: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        self.before.append(_gradients(optimizer))
        if len(self.before) == 1:
            optimizer.register_step_post_hook(lambda stepped, *_: self.stepped.append(_gradients(stepped)))


def _gradients(optimizer: Optimizer) -> Tensor:
    given = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([gradient.flatten() for gradient in given if gradient is not None])


class Manual(Toy):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__("init")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._sample_loss(batch).mean())
        optimizer.step()


@pytest.mark.parametrize("module", [Toy, Manual])
def test_guards_come_first_and_clipping_last(module: Callable[[], Any]) -> None:
    states = []
    for order in itertools.permutations(range(4)):
        parts = [Judges(), Doubles(), Shifts(), GradientClipping(0.01)]
        notes = Notes()
        torch.manual_seed(0)
        trainer([*(parts[i] for i in order), notes], max_steps=2).fit(trained := module(), data(), data())
        judges, doubles, shifts, _ = parts
        for i, before in enumerate(notes.before):
            assert torch.equal(judges.seen[i], before)
            assert torch.equal(doubles.seen[i], before)
            assert torch.equal(shifts.seen[i], 2 * before)
            changed = 2 * before + 0.01
            torch.testing.assert_close(notes.stepped[i], changed * (0.01 / changed.norm()))
        assert len(notes.stepped) == 2
        states.append(weights(trained))
    for state in states[1:]:
        assert_equal(states[0], state)


def test_gradient_clip_val_holds_for_what_techniques_have_made() -> None:
    notes = Notes()
    trainer([Shifts(), notes, Doubles()], max_steps=2, gradient_clip_val=0.01).fit(Toy(), data(), data())
    for before, stepped in zip(notes.before, notes.stepped, strict=True):
        changed = 2 * before + 0.01
        torch.testing.assert_close(stepped, changed * (0.01 / changed.norm()), rtol=1e-4, atol=1e-8)


def _are_changed(run: Run) -> None:
    assert len(run.technique("Doubles").seen) == len(run.technique("Shifts").seen) == run.trainer.global_step
    assert run.technique("GradientClipping").max_norm == 0.01


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not check_neutral])
def test_several_that_change_gradients_keep_the_contract(check: Callable[[Case], None]) -> None:
    check(Case(lambda: [GradientClipping(0.01), Shifts(), SpikeGuard(window=2), Doubles()], _are_changed))


def test_a_guard_that_drops_the_gradients_leaves_none_to_change() -> None:
    class Drops(Changes):
        phase = Phase.GUARD

        def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
            optimizer.zero_grad()

    class Counts(Changes):
        def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
            self.seen.append(torch.tensor(len(gradients)))

    counts = Counts()
    module = Toy()
    before = weights(module)
    trainer([counts, Drops()], max_steps=2).fit(module, data(), data())
    assert counts.seen == [0, 0]
    assert_equal(before, weights(module))


def test_the_mix_in_is_not_forgotten() -> None:
    class Plain(Technique):
        def change_gradients(self, gradients: Any, optimizer: Any, module: Any) -> None:
            """Would never be called."""

    with pytest.raises(ConfigurationError, match=r"write class Plain\(GradientHooks, Technique\)"):
        trainer([Plain()]).fit(Toy(), data(), data())

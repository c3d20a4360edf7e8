"""What somebody else writes to have a technique checked, and that each check fails for what it is there for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lit_efficient import CheckpointHooks, Phase, Report, ScheduleFree, Technique, testing
from lit_efficient.testing import Case, Run, check_technique

# A technique and its test, as somebody else writes them -------------------------------------------------------------


class Clamp(Technique):
    """Keep all weights within [-limit, limit] after each step."""

    phase = Phase.CONSTRAIN

    def __init__(self, limit: float = 0.1) -> None:
        super().__init__()
        self.limit = limit

    def describe(self, module: nn.Module) -> Report:
        return Report(f"weights stay within {self.limit:g}")

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            parameter.clamp_(-self.limit, self.limit)


def stays_small(run: Run) -> None:
    for state in (run.module.state_dict(), run.checkpoint["state_dict"], run.exported()["state_dict"]):
        assert max(tensor.abs().max() for tensor in state.values()) <= 0.1 + 1e-6, "weights beyond the limit"


def test_clamp_keeps_the_contract() -> None:
    check_technique(Clamp, stays_small, neutral=lambda: Clamp(limit=1e9))


def test_that_takes_at_most_40_lines() -> None:
    parts = (Clamp, stays_small, test_clamp_keeps_the_contract)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 40


# What each check is there for ----------------------------------------------------------------------------------------


class Renames(Clamp):
    def transform(self, module: nn.Module) -> Report:
        module.net.head = nn.Sequential(module.net.head)
        return Report("the head is wrapped")


class Reshapes(Clamp):
    def transform(self, module: nn.Module) -> Report:
        module.net.head.bias = nn.Parameter(torch.zeros(1, 16))
        return Report("the bias has two dimensions")


class DoesNothing(Clamp):
    def after_step(self, *_: Any) -> None:
        """Forget it."""


class SaysNothing(Clamp):
    def describe(self, module: nn.Module) -> None:
        return None


class DrawsForEverybody(Clamp):
    def transform(self, module: nn.Module) -> Report:
        return Report(f"a number was drawn: {torch.rand(())}")


class IsUndone(Clamp):
    @torch.no_grad()
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.head.weight.mul_(10)


class IsUndoneInCheckpoints(CheckpointHooks, Clamp):
    def write_checkpoint(self, checkpoint: dict[str, Any], module: Any) -> None:
        checkpoint["state_dict"] = {name: 10 * tensor for name, tensor in checkpoint["state_dict"].items()}


class WorksInConfigureModelAlone(Clamp):
    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        if module.where == "configure_model":
            super().after_step(optimizer, module)


class TurnsItsArgument(Clamp):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.limit *= 1 - 1e-7


class LeavesAHook(Clamp):
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.head.register_forward_hook(lambda module, given, output: output + 1)


class TakesALambda(Clamp):
    def __init__(self, limit: float = 0.1, power: Callable[[float], float] = lambda limit: limit) -> None:
        super().__init__(limit)
        self.power = power


class KeepsAnotherValue(Clamp):
    def __init__(self, limit: float = 0.2) -> None:
        super().__init__(limit / 2)


class ForgetsItsState(Clamp):
    def __init__(self, limit: float = 0.1) -> None:
        super().__init__(limit)
        self._steps = 0

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._steps += 1
        for parameter in module.parameters():
            parameter.clamp_(-self.limit / self._steps, self.limit / self._steps)


class StoresAnObject(Clamp):
    def state_dict(self) -> dict[str, Any]:
        return {"itself": Case(list, stays_small)}


class StoresALambda(Clamp):
    def state_dict(self) -> dict[str, Any]:
        return {"power": lambda limit: limit}


class ChangesWhatIsTested(Clamp):
    @torch.no_grad()
    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.head.weight.mul_(0.5)


class StaysInTheModule(Clamp):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backward = pl_module.backward


class ForgetsToCallSuper(Clamp):
    def on_exception(self, *_: Any) -> None:
        """Leave the wraps where they are."""


class ClosesOverForward(Clamp):
    def transform(self, module: nn.Module) -> Report:
        inner = module.net.head.forward
        module.net.head.forward = lambda x: 2 * inner(x)
        return Report("twice the output")


class KnowsOneNamespace(Clamp):
    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        if isinstance(module, LightningModule):
            super().after_step(optimizer, module)


BROKEN = [
    (TakesALambda, "check_arguments", "must be primitives"),
    (KeepsAnotherValue, "check_arguments", "must be attributes as given"),
    (Renames, "check_acts", "no longer loads: .* are gone"),
    (Reshapes, "check_acts", "other shapes"),
    (DoesNothing, "check_acts", "the weights are not those|the weights are those of a plain run"),
    (SaysNothing, "check_acts", "report nothing"),
    (DrawsForEverybody, "check_acts", "draws from torch's generator"),
    (IsUndone, "check_acts", "beyond the limit"),
    (IsUndoneInCheckpoints, "check_acts", "beyond the limit"),
    (WorksInConfigureModelAlone, "check_acts", "built in init"),
    (ForgetsItsState, "check_resumes", "resumed is not uninterrupted"),
    (StoresAnObject, "check_loads_safely", "weights_only=True"),
    (StoresALambda, "check_loads_safely", "cannot be saved"),
    (TurnsItsArgument, "check_loads_safely", "not what was given"),
    (ChangesWhatIsTested, "check_stages", "evaluation changes the weights"),
    (LeavesAHook, "check_stages", "leave forward hooks behind"),
    (StaysInTheModule, "check_cleans_up", "stay wrapped"),
    (ForgetsToCallSuper, "check_cleans_up", "stay wrapped"),
    (ClosesOverForward, "check_deep_copy", "no longer train"),
    (KnowsOneNamespace, "check_standalone", "pytorch_lightning is not"),
]


@pytest.mark.turns(4)
@pytest.mark.parametrize(("kind", "check", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_each_check_fails_for_what_it_is_there_for(kind: type[Technique], check: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        getattr(testing, check)(Case(lambda: [kind()], stays_small))


@pytest.mark.parametrize("holds", [lambda run: None, lambda run: len(run.steps) > 0])
def test_an_effect_that_always_holds_is_found(holds: Callable[[Run], object]) -> None:
    with pytest.raises(AssertionError, match="the effect also holds for a run without the technique"):
        testing.check_effect_is_real(Case(lambda: [Clamp()], holds))


def test_a_neutral_setting_that_is_none_is_found() -> None:
    with pytest.raises(AssertionError, match="neutral is not plain Lightning"):
        testing.check_neutral(Case(lambda: [Clamp()], stays_small, neutral=lambda: [Clamp()]))


class ClampsLate(Clamp):
    """Clamps the training weights in a hook of Lightning's, which optimizers that average by themselves do not see."""

    after_step = Technique.after_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        super().after_step(trainer.optimizers[0], pl_module)


def test_a_technique_that_another_one_undoes_is_found() -> None:
    """The weights that schedule-free training validates and saves are not those that it trains."""
    testing.check_resumes(Case(lambda: [ClampsLate()], stays_small))
    testing.check_resumes(Case(lambda: [Clamp(), ScheduleFree()], stays_small))
    with pytest.raises(AssertionError, match="beyond the limit"):
        testing.check_resumes(Case(lambda: [ClampsLate(), ScheduleFree()], stays_small))


def test_all_checks_are_run() -> None:
    tested = {check for _, check, _ in BROKEN} | {"check_neutral", "check_effect_is_real"}
    assert tested == {check.__name__ for check in testing.CHECKS}

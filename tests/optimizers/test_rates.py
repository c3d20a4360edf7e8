"""Discriminative rates: each part follows the schedule of its group, divided by its power of the decay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from lit_efficient import ConfigurationError, discriminative_rates, split_groups

STEPS = 12
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.9**i]),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda i: 0.95),
    "step": lambda o: lrs.StepLR(o, 3),
    "multi_step": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 10),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "one_cycle": lambda o: lrs.OneCycleLR(o, [1e-2, 4e-2], total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, [1e-3, 2e-3], [1e-2, 3e-2], step_size_up=4, cycle_momentum=True),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, factor=0.5, min_lr=[1e-3, 2e-3]),
}


def _make(schedule: str, tensors: bool = False) -> tuple[torch.optim.Optimizer, Any, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    rates = [torch.tensor(0.02), torch.tensor(0.05)] if tensors else [0.02, 0.05]
    groups = [
        {"params": parameters[:3], "lr": rates[0], "name": "a", "weight_decay": 0.5},
        {"params": parameters[3:], "lr": rates[1], "name": "b"},
    ]
    optimizer = torch.optim.AdamW(groups, capturable=False)
    return optimizer, SCHEDULES[schedule](optimizer), parameters


def _rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[dict[str, float]]:
    history = []
    for _ in range(STEPS):
        history.append({group["name"]: float(group["lr"]) for group in optimizer.param_groups})
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR's own use of the epoch argument
            optimizer.step()
            scheduler.step(1.0) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()
    return history


@pytest.mark.parametrize("tensors", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_part_follows_its_groups_schedule_in_proportion(schedule: str, tensors: bool) -> None:
    if tensors and schedule in ("plateau", "cyclic"):
        pytest.skip("torch's own takes no tensor")
    plain = _rates(*_make(schedule, tensors)[:2])
    optimizer, scheduler, parameters = _make(schedule, tensors)
    part = {id(p): k for p, k in zip(parameters, [0, 2, 0, 1, 3], strict=True)}
    split_groups(optimizer, [scheduler], lambda p: part[id(p)], decay=2.0)
    ours = _rates(optimizer, scheduler)
    assert {name: len({r[name] for r in plain}) > 1 for name in "ab"} == {"a": True, "b": True}
    for before, after in zip(plain, ours, strict=True):
        assert list(after) == ["a/0", "a/2", "b/1", "b/3"]
        for name, rate in after.items():
            assert rate == pytest.approx(before[name[0]] / 2.0 ** int(name[2]), rel=1e-6)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 1, 1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5, 0.01, 0.01]


def test_rates_of_ulmfit() -> None:
    assert discriminative_rates(0.01, 3) == pytest.approx([0.01, 0.01 / 2.6, 0.01 / 2.6**2])


def test_one_part_changes_nothing_and_names_of_parameters_are_split_along() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    split_groups(optimizer, [], lambda p: 0)
    assert optimizer.param_groups[0] is group
    split_groups(optimizer, [], lambda p: int(p is net.weight), decay=2.0)
    assert [(g["param_names"], g["lr"]) for g in optimizer.param_groups] == [(["bias"], 0.1), (["weight"], 0.05)]


def test_what_cannot_be_split_is_an_error() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    part = {id(p): k for k, p in enumerate(parameters)}
    lbfgs = torch.optim.LBFGS(parameters)
    with pytest.raises(ConfigurationError, match="LBFGS keeps one state"):
        split_groups(lbfgs, [], lambda p: part[id(p)])
    sgd = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"eta_min=0\.09\) is above the rate 0\.05"):
        split_groups(sgd, [lrs.CosineAnnealingLR(sgd, 5, eta_min=0.09)], lambda p: part[id(p)], decay=2.0)

    for where in ("group", "attribute"):
        foreign = torch.optim.SGD(parameters, lr=0.1)
        buffers = [torch.zeros_like(p) for p in parameters]
        if where == "group":
            foreign.param_groups[0]["buffers"] = buffers
        else:
            foreign.buffers = [buffers]  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="SGD keeps tensors of its groups in 'buffers'"):
            split_groups(foreign, [], lambda p: part[id(p)])
    numbers = torch.optim.AdamW(parameters, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)))
    split_groups(numbers, [], lambda p: part[id(p)])
    assert len(numbers.param_groups) == 2

    class Foreign:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    other = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ConfigurationError, match="Foreign is no"):
        split_groups(other, [Foreign(other)], lambda p: part[id(p)])

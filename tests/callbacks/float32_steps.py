"""What the two ways to step bfloat16 weights share in their tests: the same small steps, and a run of the contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.optimizers.float32_step import COMPENSATION, Float32Step
from lit_efficient.testing import Run

RATE, STEPS = 1e-4, 500


def walked(make: Any, arrange: Any = None, *, steps: int = STEPS, shape: tuple[int, ...] = (8, 16)) -> Any:
    """Parameter and optimizer after steps of the same gradient, from ones."""
    p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer = make([p])
    if arrange is not None:
        arrange(optimizer)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p.detach(), optimizer


def exact(optimizer: Any, p: Tensor) -> Tensor:
    """The weight with what rounding took off it, if that is kept."""
    return p.detach().double() + optimizer.state[p].get(COMPENSATION, torch.zeros(())).double()


def small_steps_survive(run: Run) -> None:
    """Twenty steps of 1e-4 from one end at 0.998 with the run's own optimizer, where plain bfloat16 stays at one."""
    (optimizer,) = run.trainer.optimizers
    assert isinstance(optimizer, Float32Step)
    p = run.module.net.low
    stepped = bool(optimizer.state.get(p))  # else it is frozen for now
    for states in (run.checkpoint["optimizer_states"][0]["state"], optimizer.state):
        assert any(COMPENSATION in state for state in states.values()) == (optimizer.rounding.compensated and stepped)
    groups, step = optimizer.param_groups, optimizer.rounding.step
    before, state = p.detach().clone(), optimizer.state.pop(p, {})
    optimizer.param_groups = [{**group, "lr": RATE, "weight_decay": 0.0} for group in groups]
    gradients = [(other, other.grad) for group in groups for other in group["params"]]
    try:
        for other, _ in gradients:
            other.grad = None
        with torch.no_grad():
            p.fill_(1.0)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert abs(exact(optimizer, p).mean().item() - (1 - 20 * RATE)) < 6e-4
    finally:
        optimizer.param_groups, optimizer.rounding.step = groups, step
        optimizer.state.pop(p, None)
        optimizer.state.update({p: state} if stepped else {})
        for other, gradient in gradients:
            other.grad = gradient
        with torch.no_grad():
            p.copy_(before)

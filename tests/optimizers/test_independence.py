"""Optimizers that cannot step some of their parameters at a time are refused by all that would do so."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.optimizers.float32_step import step_in_float32
from lit_efficient.optimizers.host_states import stream_states
from lit_efficient.optimizers.in_backward import step_in_backward
from lit_efficient.optimizers.rates import split_groups
from tests.support import Net, assert_equal, weights


class Clipping(torch.optim.SGD):
    """Optimizer that clips by the norm of all gradients in its step, as some implementations of LAMB do."""

    limit = 1.0

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.limit)
        return super().step(closure)


class Prodigious(torch.optim.SGD):
    """Optimizer whose rate depends on all gradients together."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] = 1 / (1 + float(torch.cat([g.flatten() for g in gradients]).norm()))
            for p, g in zip(group["params"], gradients):
                p.data.sub_(g, alpha=group["d"])


class Lookahead(Optimizer):
    """Slow weights around another optimizer, with its groups and states, as in timm and torch-optimizer."""

    def __init__(self, parameters: Any, lr: float, shared: bool = True) -> None:
        self.fast = torch.optim.AdamW(parameters, lr=lr)
        self.steps = 0
        super().__init__(self.fast.param_groups, {})
        if shared:
            self.param_groups = self.fast.param_groups
        self.state = self.fast.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.steps % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return loss


class SharpnessAware(torch.optim.SGD):
    """Optimizer that calls its closure twice, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


STEPS: dict[str, Callable[[Optimizer], Any]] = {
    "in_backward": step_in_backward,
    "streamed": functools.partial(stream_states, piece_bytes=64),
    "float32": functools.partial(step_in_float32, compensated=True),
}
REASONS: dict[type[Optimizer], str] = {
    Clipping: "step of Clipping treats its parameters together",
    Prodigious: "step of Prodigious treats its parameters together",
    Lookahead: r"Lookahead contains another optimizer \(fast: AdamW\)",
    SharpnessAware: "SharpnessAware cannot step parameters one by one: .*not callable",
    torch.optim.LBFGS: "LBFGS (cannot step parameters one by one: .*closure|keeps one state for all parameters)",
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", REASONS)
def test_an_optimizer_that_steps_all_parameters_together_is_refused_before_it_steps(
    kind: Callable[..., Optimizer], step: str
) -> None:
    network = Net().to(torch.bfloat16 if step == "float32" else torch.float32)
    before, optimizer = weights(network), kind(network.parameters(), lr=1e-2)
    groups, state = copy.copy(optimizer.param_groups), torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=REASONS[kind]):  # type: ignore[index]
        STEPS[step](optimizer)
    assert_equal(before, weights(network))
    assert not optimizer.state
    assert optimizer.param_groups == groups
    assert torch.equal(state, torch.get_rng_state())


def test_groups_are_split_for_the_optimizer_inside_too_or_not_at_all() -> None:
    network = Net()
    shared = Lookahead(network.parameters(), lr=1e-2)
    split_groups(shared, [], lambda p: int(p is network.stem.weight), decay=2.0)
    assert [group["lr"] for group in shared.fast.param_groups] == [1e-2, 5e-3]
    own = Lookahead(network.parameters(), lr=1e-2, shared=False)
    with pytest.raises(ConfigurationError, match=r"Lookahead contains another .* with groups of its own"):
        split_groups(own, [], lambda p: int(p is network.stem.weight), decay=2.0)
    assert len(own.param_groups) == 1

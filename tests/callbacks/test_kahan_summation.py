"""KahanSummation: weights follow an exact loop, at 2 bytes per parameter, and runs resume exactly."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, KahanSummation, step_in_float32
from lit_efficient.optimizers.float32_step import COMPENSATION
from tests.callbacks.float32_steps import RATE, exact, small_steps_survive, walked
from tests.contract.row import Row
from tests.state_bytes import measure_state_bytes

ROW = Row(KahanSummation, small_steps_survive, bfloat16=True, changes=False)


def adamw(parameters: Any, decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, weight_decay=decay)


def compensate(optimizer: Any) -> None:
    KahanSummation().rewrite_optimizer(optimizer, nn.Module())


def test_five_hundred_small_steps_end_where_they_should() -> None:
    """AdamW's moments in bfloat16 need 4 bytes and the compensation 2."""
    plain, without = walked(adamw)
    ours, optimizer = walked(adamw, compensate)
    (p,) = optimizer.param_groups[0]["params"]
    assert torch.equal(plain, torch.ones_like(plain))
    assert (ours == torch.full_like(ours, 0.95)).double().mean().item() > 0.9  # the bfloat16 that is nearest
    assert exact(optimizer, p).mean().item() == pytest.approx(0.95, abs=1e-4)
    assert (exact(optimizer, p) - 0.95).abs().max().item() < 2e-3  # moments are rounded by chance
    assert measure_state_bytes(optimizer) - measure_state_bytes(without) == 2 * p.numel()
    report = KahanSummation().rewrite_optimizer(adamw([nn.Parameter(torch.ones_like(p))]), nn.Module())
    assert report.details["compensation_bytes"] == 2 * p.numel()


def test_follows_an_exact_loop_where_plain_bfloat16_does_not() -> None:
    """The exact loop is AdamW in float64 with random gradients and decay, from weights of 0.02, at a rate of 1e-5."""
    torch.manual_seed(0)
    start = (torch.randn(64, 64) * 0.02).bfloat16()
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    x, ours, plain = (nn.Parameter(start.double()), *(None, None))
    options: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
    reference, ours, plain = (torch.optim.AdamW([w], **options) for w in (x, p, q))
    compensate(ours)
    drift = torch.randn(64, 64)
    for _ in range(100):
        gradient = (torch.randn(64, 64) + drift).bfloat16()
        p.grad, q.grad, x.grad = gradient, gradient.clone(), gradient.double()
        for optimizer in (reference, ours, plain):
            optimizer.step()
    moved = (x - start).norm().item()
    assert (exact(ours, p) - x).norm().item() < 0.02 * moved
    assert (q.double() - x).norm().item() > 0.2 * moved


def test_steps_far_below_the_compensation_s_own_digits_are_kept_on_average() -> None:
    """With steps of 1e-6 from one, a compensation that is rounded to nearest stops at 5e-4."""
    _, optimizer = walked(lambda p: torch.optim.SGD(p, 1e-6), compensate, steps=1000, shape=(32, 32))
    (p,) = optimizer.param_groups[0]["params"]
    assert exact(optimizer, p).mean().item() == pytest.approx(1 - 1e-3, abs=2e-5)


def test_resumes_bit_exactly_from_a_safe_load() -> None:
    def go(p: nn.Parameter, optimizer: Any, steps: range) -> None:
        for i in steps:
            torch.manual_seed(i)
            p.grad = torch.randn(p.shape).bfloat16()
            optimizer.rounding.step = i
            optimizer.step()

    p = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    compensate(optimizer := adamw([p], 0.1))
    go(p, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    go(p, optimizer, range(3, 6))
    again = nn.Parameter(kept["p"])
    compensate(other := adamw([again], 0.1))
    other.load_state_dict(kept["optimizer"])
    go(again, other, range(3, 6))
    assert torch.equal(p, again)
    assert torch.equal(optimizer.state[p][COMPENSATION], other.state[again][COMPENSATION])


def test_float32_parameters_beside_them_step_as_before() -> None:
    low, high, alone = nn.Parameter(torch.ones(4).bfloat16()), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer, other = adamw([low, high], 0.1), adamw([alone], 0.1)
    assert step_in_float32(optimizer, compensated=True) == 4
    for _ in range(3):
        low.grad, high.grad, alone.grad = torch.ones(4).bfloat16(), torch.ones(4), torch.ones(4)
        optimizer.step()
        other.step()
    assert torch.equal(high, alone)
    assert set(optimizer.state[high]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ConfigurationError, match="KahanSummation: no parameter that AdamW trains is bfloat16"):
        KahanSummation().rewrite_optimizer(adamw([high]), nn.Module())

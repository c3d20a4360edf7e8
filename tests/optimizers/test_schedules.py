"""Schedules: factors of transformers' and torch's, for every optimizer; what is logged is the step's."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import (
    ConfigurationError,
    ExactResume,
    InverseSquareRoot,
    RunMetrics,
    WarmupConstant,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    to_low_bit,
)
from lit_efficient.optimizers.schedules import FactorLRScheduler, warmup_cosine
from tests.support import trainer

STEPS, WARM, DECAY = 40, 8, 12


def test_the_rate_rises_then_falls_to_zero() -> None:
    factors = [warmup_cosine(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert warmup_cosine(10**6, 10, math.inf) == 1.0
    assert warmup_cosine(0, 0, 10) == 1.0


def two_groups(rates: tuple[float, float] = (0.1, 0.02)) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])


def walked(schedule: Any, steps: int = STEPS + 5) -> list[list[float]]:
    """The rates of each step."""
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return rates


def wsd(shape: str, theirs: str) -> Any:
    return pytest.param(
        lambda o: WarmupStableDecay(o, STEPS, WARM, DECAY, shape, 0.1),  # type: ignore[arg-type]
        lambda o: transformers.get_wsd_schedule(
            o, WARM, DECAY, num_training_steps=STEPS, decay_type=theirs, min_lr_ratio=0.1
        ),
        id=f"wsd-{shape}",
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(
            lambda o: WarmupConstant(o, WARM),
            lambda o: transformers.get_constant_schedule_with_warmup(o, WARM),
            id="constant",
        ),
        pytest.param(
            lambda o: WarmupLinear(o, STEPS, WARM),
            lambda o: transformers.get_linear_schedule_with_warmup(o, WARM, STEPS),
            id="linear",
        ),
        pytest.param(
            lambda o: WarmupCosine(o, STEPS, 0.2),  # the same, as a share
            lambda o: transformers.get_cosine_schedule_with_warmup(o, WARM, STEPS),
            id="cosine",
        ),
        pytest.param(
            lambda o: WarmupCosine(o, STEPS, WARM, 0.1),
            lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, WARM, STEPS, min_lr_rate=0.1),
            id="cosine-final",
        ),
        pytest.param(
            lambda o: InverseSquareRoot(o, WARM),
            lambda o: transformers.get_inverse_sqrt_schedule(o, WARM),
            id="inverse",
        ),
        wsd("linear", "linear"),
        wsd("cosine", "cosine"),
        wsd("sqrt", "1-sqrt"),
    ],
)
def test_equals_transformers_whose_warm_up_begins_with_a_step_of_zero(ours: Any, theirs: Any) -> None:
    mine, others = walked(ours(two_groups())), walked(theirs(two_groups()), STEPS + 6)
    floor = 0.1 if others[0][0] else 0.0  # of theirs, which begins the warm-up there
    for step, (a, b) in enumerate(zip(mine[: STEPS + 1], others)):  # theirs rises again after the end
        expected = others[step + 1] if step < WARM - 1 else b
        if step < WARM - 1 and floor:
            expected = [rate * (step + 1) / WARM for rate in (0.1, 0.02)]
        assert a == pytest.approx(expected if step != WARM - 1 else [0.1, 0.02], abs=1e-12), step


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda o: WarmupLinear(o, STEPS, 0, 0.25),
            lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=STEPS),
        ),
        (lambda o: WarmupCosine(o, STEPS, 0), lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS)),
    ],
)
def test_without_warm_up_equals_torch(ours: Any, theirs: Any) -> None:
    for a, b in zip(walked(ours(two_groups()), STEPS), walked(theirs(two_groups()), STEPS), strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-12)


def low_bit(parameters: Any) -> Any:
    to_low_bit(optimizer := torch.optim.AdamW(parameters, 1e-2), min_size=0)
    return optimizer


@pytest.mark.parametrize(
    "kind", ["FusedAdamW", "GroupedAdafactor", "Lion", "MuonAdamW", "ScheduleFreeAdamW", "low_bit", "tensor"]
)
def test_every_optimizer_steps_at_the_rate_of_the_schedule(kind: str) -> None:
    """A rate of zero moves nothing, and another one does; each group keeps its own proportion."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(2)]
    groups = [{"params": [w], "lr": rate} for w, rate in zip(weights, (1e-2, 2e-2))]
    optimizer: Any = {
        "low_bit": low_bit,
        "tensor": lambda g: torch.optim.AdamW([{**one, "lr": torch.tensor(one["lr"])} for one in g]),
    }.get(kind, getattr(lit_efficient, kind, None))(groups)
    if hasattr(optimizer, "train"):
        optimizer.train()
    schedule = WarmupLinear(optimizer, 4, 2)
    for step in range(6):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([base * schedule.factor(step) for base in (1e-2, 2e-2)], rel=1e-6)
        assert rates == pytest.approx([float(rate) for rate in schedule.get_last_lr()])
        before = [w.detach().clone() for w in weights]
        for w in weights:
            w.grad = torch.randn_like(w)
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, weights)]
        assert all(moved) if step < 4 else kind == "ScheduleFreeAdamW" or not any(moved), (step, moved)
        schedule.step()


class Slope(pl.LightningModule):
    """Its gradient is 1: each step moves the weight by the rate, and nothing else."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.schedule, self.seen = schedule, [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w + 0 * batch.sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.w.item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(20, 1))


class Rates(Logger):
    """Keeps each logged rate."""

    name, version = "rates", 0

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[int, float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "lr" in metrics:
            self.rates[step or 0] = metrics["lr"]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Of no interest."""


def fit(module: Any, steps: int, ckpt_path: Any = None, **arguments: Any) -> Any:
    run = trainer([ExactResume(0), RunMetrics()], max_epochs=-1, max_steps=steps, log_every_n_steps=1, **arguments)
    run.fit(module, ckpt_path=ckpt_path)
    return run


def test_the_rate_that_is_logged_is_that_of_the_step() -> None:
    logger, module = Rates(), Slope(lambda o: WarmupStableDecay(o, 10, 2, 4))
    fit(module, 10, logger=logger)
    used = [before - after for before, after in itertools.pairwise(module.seen)]
    assert used == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert list(logger.rates.values()) == pytest.approx(used)


def test_a_cool_down_begins_at_any_checkpoint(tmp_path: Path) -> None:
    """Of a run of 20 steps, at step 10: four steps of cool-down, and the same again with the run's own length."""
    run = fit(Slope(lambda o: WarmupStableDecay(o, 20, 2, 5)), 10)
    run.save_checkpoint(tmp_path / "10.ckpt", weights_only=False)
    cooled = Slope(lambda o: WarmupStableDecay(o, 14, 2, 4))
    fit(cooled, 14, tmp_path / "10.ckpt")
    used = [before - after for before, after in itertools.pairwise(cooled.seen[1:])]
    assert used == pytest.approx([0.75, 0.5, 0.25])
    start = torch.load(tmp_path / "10.ckpt", weights_only=True)["state_dict"]["w"].item()
    assert start - cooled.seen[1] == pytest.approx(1.0)
    late = Slope(lambda o: WarmupStableDecay(o, 12, 2, 4))  # half of it is over at step 10
    fit(late, 12, tmp_path / "10.ckpt")
    assert start - late.seen[1] == pytest.approx(0.5)
    straight, again = (Slope(lambda o: WarmupStableDecay(o, 20, 2, 5)) for _ in range(2))
    fit(straight, 20)
    fit(again, 20, tmp_path / "10.ckpt")
    assert again.w.item() == straight.w.item()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupConstant(o, -1), "WarmupConstant: warmup must be a whole number of at least 0, got -1"),
        (lambda o: InverseSquareRoot(o, 0), "InverseSquareRoot: warmup must be a whole number of at least 1, got 0"),
        (lambda o: WarmupLinear(o, 0), "WarmupLinear: total_steps must be a whole number of at least 1, got 0"),
        (
            lambda o: WarmupLinear(o, 9, 1.5),
            "WarmupLinear: warmup must be a whole number of steps .* or a share.* got 1.5",
        ),
        (lambda o: WarmupCosine(o, 9, final=2.0), "WarmupCosine: final must be at least 0 and at most 1, got 2.0"),
        (lambda o: WarmupStableDecay(o, 9, 0, 0.5, "step"), "shape must be one of linear, cosine, sqrt, got 'step'"),  # type: ignore[arg-type]
        (
            lambda o: WarmupStableDecay(o, 10, 0.5, 6),
            "decay must be at most the 10 steps of the run, minus those of warmup, got 6",
        ),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(two_groups())


def test_the_base_leaves_the_factor_to_its_heirs() -> None:
    with pytest.raises(NotImplementedError):
        FactorLRScheduler(two_groups())

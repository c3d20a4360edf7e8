"""What a technique does after each optimizer step: the weights are clamped, and stay so wherever they are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from lit_efficient import (
    EMA,
    CheckpointAverage,
    ConflictError,
    LoRA,
    LowBitOptimizer,
    LRFinder,
    MaxBatchSize,
    Phase,
    PowerEMA,
    Report,
    ScheduleFree,
    Technique,
)
from tests.processes import run_ranks
from tests.ranks.toys import Sharded, sharding, weights_of_all, whole
from tests.support import SCHEDULERS, Toy, assert_equal, data, trainer, weights

BOUND = 0.02
ROUNDED = BOUND * (1 + 1e-6)  # averages are computed from bounded weights


class Clamp(Technique):
    """Clamp all weights to [-bound, bound] after each step."""

    phase = Phase.CONSTRAIN

    def __init__(self, bound: float = BOUND) -> None:
        super().__init__()
        self.bound = bound
        self.calls = 0

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.calls += 1
        for p in module.parameters():
            p.clamp_(-self.bound, self.bound)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"weights in [-{self.bound:g}, {self.bound:g}]")


class Watch(Callback):
    """The largest weight at the end of each batch, and the steps that there have been."""

    def __init__(self) -> None:
        self.largest: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.largest.append(largest(dict(pl_module.named_parameters())))
        self.steps.append(trainer.global_step)


def largest(tensors: Any) -> float:
    return max(float(tensor.detach().abs().max()) for tensor in tensors.values())


def fit(callbacks: list[Any], module: Any = None, **arguments: Any) -> tuple[Any, Watch]:
    watch = Watch()
    torch.manual_seed(0)
    run = trainer([*callbacks, watch], **arguments)
    run.fit(module or Toy("configure_model"), data(), data())
    return run, watch


def test_without_it_the_weights_are_larger() -> None:
    _, watch = fit([])
    assert min(watch.largest) > 10 * BOUND


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_bound_holds_after_each_batch_under_every_form_of_schedule(scheduler: str) -> None:
    clamp = Clamp()
    _, watch = fit([clamp], Toy("configure_model", scheduler))
    assert len(watch.largest) == clamp.calls == 4
    assert max(watch.largest) == pytest.approx(BOUND, rel=1e-7)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "others",
    [
        pytest.param(lambda: [LowBitOptimizer(min_size=0)], id="low_bit"),
        pytest.param(lambda: [LoRA(rank=2, lr_ratio=64.0)], id="lora_plus"),  # which moves weights after a step, too
        pytest.param(lambda: [ScheduleFree()], id="schedule_free"),
        pytest.param(lambda: [EMA(decay=0.5, switch_every=2)], id="switch_ema"),
        pytest.param(lambda: [MaxBatchSize(max_size=2, keep_effective_batch=False)], id="trials"),
        pytest.param(lambda: [LRFinder(1e-3, 3.0, num_steps=12, early_stop_threshold=None)], id="rates"),
    ],
)
def test_the_bound_holds_beside_what_else_acts_on_a_step(others: Any) -> None:
    callbacks = [Clamp(), *others()]
    _, watch = fit(callbacks)
    assert max(watch.largest) <= ROUNDED
    _, watch = fit(callbacks[1:])
    assert max(watch.largest) > 2 * BOUND


def test_under_accumulation_it_acts_after_steps_alone() -> None:
    clamp = Clamp()
    _, watch = fit([clamp], accumulate_grad_batches=2)
    assert watch.steps == [0, 1, 1, 2]
    assert clamp.calls == 2
    assert watch.largest[0] > 10 * BOUND >= 10 * max(watch.largest[1:])


def test_under_manual_optimization_it_acts_after_each_step_of_each_optimizer() -> None:
    clamp = Clamp()
    run, watch = fit([clamp], Toy("configure_model", optimizers=2))
    assert clamp.calls == run.global_step == 8
    assert max(watch.largest) <= BOUND


def test_several_act_in_the_order_of_their_phases() -> None:
    heard: list[str] = []

    class Hears(Technique):
        def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
            assert not torch.is_grad_enabled()
            heard.append(type(self).__name__)

    class Alpha(Hears):
        phase = Phase.AVERAGE

    class Beta(Hears):
        phase = Phase.CONSTRAIN

    class Gamma(Hears):
        phase = Phase.LAYOUT

    fit([Alpha(), Beta(), Gamma()], max_epochs=-1, max_steps=2)
    assert heard == ["Gamma", "Beta", "Alpha"] * 2


@pytest.mark.parametrize(
    "average", [lambda: EMA(decay=0.5, warmup=None), lambda: CheckpointAverage(last_k=3, every_n_steps=1)]
)
def test_averages_are_of_clamped_weights(average: Any, tmp_path: Path) -> None:
    shadow = average()
    run, _ = fit([Clamp(), shadow])
    run.save_checkpoint(tmp_path / "full.ckpt", weights_only=False)
    run.save_checkpoint(tmp_path / "alone.ckpt", weights_only=True)
    assert largest(shadow.average(run.lightning_module)) <= ROUNDED
    for name in ("full", "alone"):
        assert largest(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]) <= ROUNDED
    with shadow.averaged(run.lightning_module):
        assert 0 < largest(weights(run.lightning_module)) <= ROUNDED


def test_averages_of_widths_are_of_clamped_weights(tmp_path: Path) -> None:
    power = PowerEMA(dirpath=str(tmp_path))
    fit([Clamp(), power])
    assert all(0 < largest(average) <= ROUNDED for average in power._averages)


def test_schedule_free_training_validates_saves_and_ends_with_clamped_weights(tmp_path: Path) -> None:
    seen: list[float] = []

    class Validated(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(largest(weights(pl_module)))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    run, _ = fit([Clamp(), ScheduleFree(), Validated()], max_epochs=2)
    saved = [torch.load(path, weights_only=True)["state_dict"] for path in sorted(tmp_path.glob("*.ckpt"))]
    largests = [*seen, *map(largest, saved), largest(weights(run.lightning_module))]
    assert len(largests) == 4 + 8 + 1
    assert max(largests) <= ROUNDED
    assert min(largests) > BOUND / 2


def test_a_bound_that_nothing_meets_leaves_schedule_free_training_as_it_is() -> None:
    plain, _ = fit([ScheduleFree()])
    bounded, _ = fit([Clamp(1e6), ScheduleFree()])
    assert_equal(weights(plain.lightning_module), weights(bounded.lightning_module))


def test_schedule_free_averages_are_those_of_the_clamped_iterates() -> None:
    """Against the definition: z is clamped after each step, x is its running mean, y lies between them."""
    from lit_efficient import ScheduleFreeAdamW

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, dtype=torch.float64))
    optimizer = ScheduleFreeAdamW([p], lr=0.1, betas=(0.9, 0.99))
    optimizer.train()
    z, x, v = p.detach().clone(), p.detach().clone(), torch.zeros_like(p)
    y = z.clone()
    for k in range(1, 8):
        g = y.sin() + 3
        p.grad = p.detach().sin() + 3
        optimizer.step()
        with torch.no_grad(), optimizer.moved_weights():
            p.clamp_(-0.5, 0.5)
        v = 0.99 * v + 0.01 * g**2
        z = (z - 0.1 * g / ((v / (1 - 0.99**k)).sqrt() + 1e-8)).clamp(-0.5, 0.5)
        x = x + (z - x) / k
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(p.detach(), y)
        torch.testing.assert_close(optimizer.averages()[p], x)


def test_a_second_run_with_the_same_optimizer_calls_it_once_a_step_and_later_steps_are_free() -> None:
    class Kept(Toy):
        def configure_optimizers(self) -> Any:
            if not hasattr(self, "kept"):
                self.kept = torch.optim.SGD(self.net.parameters(), lr=0.1)
            return self.kept

    module, clamp = Kept(), Clamp()
    for _ in range(2):
        fit([clamp], module)
    assert clamp.calls == 8
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    module.kept.step()
    assert largest(weights(module)) > 0.1
    assert clamp.calls == 8


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_leaves_out_is_none(fused: bool) -> None:
    class Overflows(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * torch.inf if batch_idx == 1 else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=fused)

    clamp = Clamp()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    run, watch = fit([clamp], Overflows("configure_model"), plugins=[plugin])
    assert clamp.calls == 3
    assert max(watch.largest) <= BOUND
    assert torch.isfinite(run.lightning_module.net.head.weight).all()


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = fit([Clamp(), EMA(decay=0.5)], max_epochs=2)
    half, _ = fit([Clamp(), EMA(decay=0.5)], max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    resumed = trainer([Clamp(), EMA(decay=0.5)], max_epochs=2)
    resumed.fit(Toy("configure_model"), data(), data(), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(whole.lightning_module), weights(resumed.lightning_module))


def test_strategies_that_step_other_tensors_are_refused() -> None:
    class FSDPStrategy(SingleDeviceStrategy):
        """By its name one of those."""

    with pytest.raises(ConflictError, match=r"Clamp changes the weights after each step, but FSDPStrategy steps other"):
        fit([Clamp()], strategy=FSDPStrategy("cpu"), accelerator="auto", devices="auto")


@pytest.mark.turns(6, family="ranks")
def test_the_bound_holds_on_two_processes(tmp_path: Path) -> None:
    run_ranks(_bounded_on_ranks, tmp_path)


class _WatchWhole(Watch):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.largest.append(largest(whole(pl_module.state_dict())))


def _bounded_on_ranks() -> None:
    for kind, strategy in ((Toy, "ddp"), (Sharded, sharding())):
        clamp, ema, watch = Clamp(), EMA(decay=0.5), _WatchWhole()
        run = trainer([clamp, ema, watch], devices=2, strategy=strategy)
        run.fit(module := kind("configure_model"), data(32), data(16))
        assert clamp.calls == run.global_step == 4
        assert 0.99 * BOUND < max(watch.largest) <= BOUND
        assert largest(whole(ema.average(module))) <= ROUNDED
        assert_equal(*weights_of_all(module))

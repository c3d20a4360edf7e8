"""OptimizerSchedule: weight decay and momentum follow the formula in each step, also after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lit_efficient import ConfigurationError, ConflictError, ExactResume, LowBitOptimizer, MuonAdamW, OptimizerSchedule
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Toy, assert_equal, data, trainer, weights


def decay_is_that_of_the_last_step(run: Run) -> None:
    schedule, optimizer = run.technique("OptimizerSchedule"), run.trainer.optimizers[0]
    total = schedule.state_dict()["steps"]
    # of the step of the last batch, which may have been a micro-batch of the one to come
    values = [between(0.5, 0.1, step / total) for step in (run.trainer.global_step - 1, run.trainer.global_step)]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert any(math.isclose(max(decays), value, rel_tol=1e-6) for value in values)
    assert schedule.state_dict()["decays"] == [[pytest.approx(decay / max(decays)) for decay in decays]]


def between(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


ROW = Row(lambda: OptimizerSchedule(weight_decay=[0.5, 0.1]), decay_is_that_of_the_last_step)


class Watch(Callback):
    """Record the settings of each step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[Any, ...]]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.seen.append([(g["weight_decay"], g.get("momentum"), g.get("betas")) for g in groups])


class Muon(Toy):
    def configure_optimizers(self) -> Any:
        return MuonAdamW(self.net.parameters())


def fit(module: Any, schedule: Any, **arguments: Any) -> list[list[tuple[Any, ...]]]:
    trainer([schedule, watch := Watch()], **arguments).fit(module, data(), data())
    return watch.seen


def test_each_step_has_the_values_of_the_formula_in_proportion() -> None:
    seen = fit(Toy(), OptimizerSchedule([0.0, 0.4], [0.85, 0.95], shape="linear"), max_epochs=2)
    assert len(seen) == 8
    for step, (decay, rest) in enumerate(seen):
        assert decay[0] == pytest.approx(0.4 * step / 8)
        assert rest[0] == pytest.approx(decay[0] / 10)  # as 0.01 to 0.1
        assert decay[2] == rest[2] == (pytest.approx(0.85 + 0.1 * step / 8), 0.95)


@pytest.mark.parametrize("run", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 24}])
def test_two_optimizers_by_hand_reach_the_end_with_the_run(run: dict[str, int]) -> None:
    seen = fit(Toy(optimizers=2), OptimizerSchedule([0.0, 1.0], until=0.5, shape="linear"), **run)
    assert [step[0][0] for step in seen] == pytest.approx([min(1.0, batch / 6) for batch in range(12) for _ in (0, 1)])


def test_after_until_the_end_stays_and_momentum_is_the_one_of_the_matrices() -> None:
    seen = fit(Muon(), OptimizerSchedule(momentum=[0.8, 0.9], until=2, shape="linear"))
    assert [group[0][1] for group in seen] == pytest.approx([0.8, 0.85, 0.9, 0.9])
    assert {group[0][0] for group in seen} == {0.1}
    assert {group[0][2] for group in seen} == {(0.9, 0.95)}


def test_resumed_where_the_decay_is_zero_it_goes_on(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt", weights_only=False)

    def end(ckpt_path: Path | None = None) -> dict[str, torch.Tensor]:
        run = trainer([OptimizerSchedule([0.0, 0.4]), ExactResume(0), Saves()], max_epochs=2)
        run.fit(module := Toy(), data(), data(), ckpt_path=ckpt_path)
        return weights(module)

    whole = end()
    for step in (1, 6):
        assert_equal(whole, end(tmp_path / f"{step}.ckpt"))


class Halved(Toy):
    """The toy with a rate that halves after two steps, and a third group that may be left out."""

    left_out = False

    def configure_optimizers(self) -> Any:
        groups = self.groups()
        if self.left_out:
            groups[1]["follow_rate"] = False
        optimizer = torch.optim.AdamW(groups, 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("power", "factor"), [(1, 0.5), (-1, 2.0), (2.0, 0.25)])
def test_weight_decay_follows_the_rate_by_a_power(power: float, factor: float, tmp_path: Path) -> None:
    start = [group.get("weight_decay", 0.01) for group in Halved().groups()]
    module = Halved()
    module.left_out = power == 1
    seen = fit(module, OptimizerSchedule(follow_rate=power))
    for step, groups in enumerate(seen):
        now = [1.0 if step < 2 else factor, 1.0 if step < 2 or module.left_out else factor]
        assert [group[0] for group in groups] == pytest.approx([decay * part for decay, part in zip(start, now)])
    both = fit(Halved(), OptimizerSchedule([0.0, 0.4], until=4, shape="linear", follow_rate=power))
    assert [step[0][0] for step in both] == pytest.approx([0.0, 0.1, 0.2 * factor, 0.3 * factor])


def test_resumed_weight_decay_follows_the_rate_from_where_it_was(tmp_path: Path) -> None:
    def end(epochs: int, ckpt_path: Path | None = None) -> dict[str, torch.Tensor]:
        run = trainer([OptimizerSchedule(follow_rate=1), ExactResume(0)], max_epochs=epochs)
        run.fit(module := Halved(), data(), data(), ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt", weights_only=False)
        return weights(module)

    end(1)
    assert_equal(end(2), end(2, tmp_path / "1.ckpt"))


class Cycles(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)]


def test_groups_without_decay_stay_without() -> None:
    class Two(Toy):
        def groups(self) -> Any:
            decay, rest = super().groups()
            return [decay, {**rest, "weight_decay": 0.0}]

    assert {step[1][0] for step in fit(Two(), OptimizerSchedule([0.1, 0.4]))} == {0.0}


class Plain(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.net.parameters(), 0.1)


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (Cycles, {"momentum": [0.8, 0.9]}, ConflictError, "OneCycleLR also changes the momentum"),
        (Plain, {"momentum": [0.8, 0.9]}, ConfigurationError, "Adagrad has neither momentum nor betas to set"),
        (
            Plain,
            {"weight_decay": [0.8, 0.9]},
            ConfigurationError,
            "no group of the optimizer has a weight_decay above 0",
        ),
        (Toy, {"follow_rate": 1.0}, ConfigurationError, "follow_rate has no effect without a learning-rate schedule"),
    ],
)
def test_nothing_to_set_and_what_sets_it_as_well_are_refused(
    module: Any, arguments: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(module(), OptimizerSchedule(**arguments))


class DecaysNothing(Toy):
    """The toy whose group with weight decay is empty, as where a rule excludes parameters by their names."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [], "weight_decay": 0.1}, {"params": [*self.parameters()], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)


def test_a_group_without_parameters_is_nothing_to_set() -> None:
    with pytest.raises(ConfigurationError, match="no group of the optimizer has a weight_decay above 0"):
        trainer([OptimizerSchedule(weight_decay=[0.8, 0.9])]).fit(DecaysNothing(), data(), data())


def test_what_compiles_its_step_for_each_value_is_refused() -> None:
    parts = [LowBitOptimizer(bits=4, min_size=0), OptimizerSchedule([0.1, 0.4])]
    with pytest.raises(ConflictError, match="torchao compiles its step again for each value"):
        trainer(parts).fit(Toy(), data(), data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "weight_decay, momentum and follow_rate are all null or 0"),
        ({"follow_rate": 0.0}, "weight_decay, momentum and follow_rate are all null or 0"),
        ({"weight_decay": [0.1]}, r"weight_decay must be two numbers \(start and end\) or null, got \[0.1\]"),
        ({"weight_decay": [0.1, -1]}, "weight_decay must be at least 0, got -1"),
        ({"momentum": [0.9, 1.0]}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"momentum": [0.9, 0.95], "until": 0}, "until must be above 0, got 0"),
        ({"momentum": [0.9, 0.95], "until": 1.5}, "until must be a whole number of steps"),
        ({"momentum": [0.9, 0.95], "shape": "step"}, "shape must be one of linear, cosine, got 'step'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"OptimizerSchedule: {message}"):
        OptimizerSchedule(**arguments)

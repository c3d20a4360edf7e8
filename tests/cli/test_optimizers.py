"""Optimizers and schedulers of a config: built late, over what trains, to the end of the run."""

import copy
import math
import pickle

import pytest
import torch

from tests.cli.toy_runs import STEPS, fit, refused
from tests.support_cli import Recorder, ToyModel


def test_the_optimizer_holds_what_trains_and_the_scheduler_knows_the_end():
    assert (
        fit(
            "--model.frozen",
            "true",
            "--optimizer",
            "AdamW",
            "--optimizer.lr",
            "0.5",
            "--lr_scheduler",
            "CosineAnnealingLR",
        )
        == 0
    )
    optimizer = Recorder.last.trainer.optimizers[0]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in ToyModel.last.net[1].parameters()]
    expected = [0.25 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert Recorder.last.rates == pytest.approx(expected)


def test_layers_made_in_configure_model_are_trained():
    assert (
        fit(
            "--model.late", "true", "--optimizer", "AdamW", "--lr_scheduler", "OneCycleLR", "--lr_scheduler.max_lr", "1"
        )
        == 0
    )
    held = [id(p) for group in Recorder.last.trainer.optimizers[0].param_groups for p in group["params"]]
    assert held == [id(p) for p in ToyModel.last.parameters()]
    assert Recorder.last.trainer.lr_scheduler_configs[0].scheduler.total_steps == STEPS


def test_arguments_that_match_names_of_parameters_find_them() -> None:
    assert fit("--optimizer=MuonAdamW", "--optimizer.heads={net.0.weight: 2}") == 0
    (held,) = [group for group in Recorder.last.trainer.optimizers[0].param_groups if "head_rows" in group]
    assert held["param_names"] == ["net.0.weight"]
    assert [id(p) for p in held["params"]] == [id(ToyModel.last.net[0].weight)]


def test_a_length_that_is_given_stays():
    assert (
        fit(
            "--optimizer", "SGD", "--optimizer.lr", "1", "--lr_scheduler", "LinearLR", "--lr_scheduler.total_iters", "2"
        )
        == 0
    )
    assert Recorder.last.rates == pytest.approx([1 / 3, 2 / 3, *[1.0] * (STEPS - 2)])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (["WarmupLinear", "--lr_scheduler.warmup=0.25"], [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (
            ["WarmupStableDecay", "--lr_scheduler.warmup=2", "--lr_scheduler.decay=0.5"],
            [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        (["InverseSquareRoot", "--lr_scheduler.warmup=2"], [0.5, 1, *[(2 / step) ** 0.5 for step in range(2, 8)]]),
    ],
)
def test_our_schedules_by_name_over_the_run_or_shares_of_it(schedule, factors):
    assert fit("--optimizer=SGD", "--optimizer.lr=0.01", "--lr_scheduler", *schedule) == 0
    assert Recorder.last.rates == pytest.approx([0.01 * factor for factor in factors])


def test_plateau_scheduler_by_its_short_name():
    assert fit("--optimizer", "SGD", "--lr_scheduler", "ReduceLROnPlateau", "--lr_scheduler.monitor", "val/loss") == 0
    config = Recorder.last.trainer.lr_scheduler_configs[0]
    assert (config.monitor, config.reduce_on_plateau, config.scheduler.last_epoch) == ("val/loss", True, 2)


def test_without_an_optimizer_key_the_module_decides():
    assert fit() == 0
    assert Recorder.last.rates == [0.25] * STEPS


def test_a_copy_of_the_module_optimizes_its_own_parameters():
    assert fit("--optimizer", "SGD", "--optimizer.lr", "0.1") == 0
    twin = copy.deepcopy(ToyModel.last)
    held = [id(p) for group in twin.configure_optimizers().param_groups for p in group["params"]]
    assert held == [id(p) for p in twin.parameters()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "AdamW", "--optimizer.lr", "-1"], ["optimizer", "AdamW", "-1"]),
        (["--lr_scheduler", "CosineAnnealingLR"], ["lr_scheduler", "optimizer"]),
        (
            [
                "--optimizer",
                "SGD",
                "--lr_scheduler",
                "OneCycleLR",
                "--lr_scheduler.max_lr",
                "1",
                "--lr_scheduler.pct_start",
                "3",
            ],
            ["OneCycleLR", "pct_start"],
        ),
        (["--optimizer", "SGD", "--lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"], ["monitor"]),
    ],
)
def test_wrong_optimizers_fail_before_data(arguments, words, capsys):
    said = refused(capsys, *arguments)
    assert all(word in said for word in words)


def test_a_schedule_free_optimizer_brings_its_callback(caplog, capsys):
    from lit_efficient import ScheduleFree

    with caplog.at_level("INFO"):
        assert fit("--optimizer", "ScheduleFreeAdamW", "--optimizer.warmup_steps", "2") == 0
    assert "added the callback ScheduleFree()" in caplog.text + capsys.readouterr().err
    trainer = Recorder.last.trainer
    assert sum(isinstance(callback, ScheduleFree) for callback in trainer.callbacks) == 1
    optimizer = trainer.optimizers[0]
    assert not optimizer.training  # the averaged weights are left in the module
    assert all("y" in optimizer.state[p] and not torch.equal(p, optimizer.state[p]["y"]) for p in optimizer.averages())


@pytest.mark.parametrize("other", ["EMA", "CheckpointAverage"])
def test_a_schedule_free_optimizer_and_another_average_are_one_error(other, capsys):
    said = refused(capsys, "--optimizer", "ScheduleFreeAdamW", f"--trainer.callbacks+={other}")
    assert f"{other} cannot be combined with ScheduleFree: both average the weights" in said
    assert "keep one of them" in said
    assert said.count("cannot be combined") == 1
    assert len(said.strip().splitlines()) <= 10


def test_a_schedule_free_callback_of_the_users_is_the_only_one():
    from lit_efficient import ScheduleFree

    given = ["--trainer.callbacks+=ScheduleFree", "--trainer.callbacks.warmup_steps=3"]
    assert fit("--optimizer", "ScheduleFreeAdamW", *given) == 0
    found = [callback for callback in Recorder.last.trainer.callbacks if isinstance(callback, ScheduleFree)]
    assert [callback.warmup_steps for callback in found] == [3]


def test_a_module_of_the_command_line_is_pickled_and_copied_with_its_optimizer():
    assert fit("-c", "ema", "--optimizer", "AdamW", "--lr_scheduler", "WarmupCosine") == 0
    module = ToyModel.last
    for again in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        twin = again(module)
        twin.trainer = module.trainer
        built = twin.configure_optimizers()["optimizer"]
        held = [id(p) for group in built.param_groups for p in group["params"]]
        assert held == [id(p) for p in twin.parameters()]

"""The learning-rate finder: its suggestion, schedules that use it, and no other change of the run."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image

from benchmarks.rate_finder import best_rate, suggested
from lit_efficient import (
    ConfigurationError,
    GradualUnfreezing,
    LRFinder,
    NonFiniteGuard,
    TokenWeightedAccumulation,
    suggest_lr,
)
from lit_efficient.mechanisms.trials.rate_range import grows, is_passed, rates_to_try
from tests.callbacks.test_max_batch_size import Noisy, _everything
from tests.processes import run_ranks
from tests.ranks.toys import everyones
from tests.support import SCHEDULERS, Toy, assert_equal, data, trainer, weights

LOW, HIGH = 1e-3, 10.0


def finder(**arguments: Any) -> LRFinder:
    return LRFinder(**{"min_lr": LOW, "max_lr": HIGH, "num_steps": 12, **arguments})


class Rates(Callback):
    """Record the rates of all groups in each step of the run."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([float(group["lr"]) for group in optimizer.param_groups])
        everything.append(self.seen[-1])


everything: list[list[float]] = []


def test_pure_functions() -> None:
    assert rates_to_try(1e-1, 1.0) == pytest.approx([1.0, 1 / 3, 1 / 9])
    assert len(rates_to_try(3.0**-14, 1.0)) == 15
    still = [2.0, 3.0] * 10
    trials = {0.0: still, 1.0: [*still[:3], math.inf], 0.1: [loss * 0.5 for loss in still], 0.01: still}
    assert suggest_lr(trials) == pytest.approx(0.1 / math.sqrt(3))
    assert suggest_lr({**trials, 0.3: [loss * 0.5 for loss in still]}) == pytest.approx(0.1)  # equal
    assert not is_passed({0.0: still, 1.0: still[:3], 0.1: trials[0.1], 0.01: still})
    assert is_passed({**trials, 0.001: still})
    for losses, message in (
        ({1.0: still}, "lower the loss by 0 on the same batches"),
        ({1.0: still[:9], 0.5: still[:9]}, r"diverges at all rates down to 0\.5: lower min_lr"),
        ({0.0: [2.0, None, None, None]}, "initial weights are 2, .* no loss in the other steps"),
        ({0.0: [2.0, math.nan, 2.0, 2.0]}, "initial weights are 2, nan, 2, 2"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            suggest_lr({0.0: still, 1.0: still, **losses})
    assert not grows([2.0, 3.0, 2.0, 3.0, 11.0], still, 2.0)
    assert grows([2.0, 3.0, 2.0, 3.0, 11.0], still, 1.5)
    assert not grows([11.0] * 4, still, 1.5)
    assert not grows([11.0] * 5, still, None)


@pytest.mark.turns(3)
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_groups_stay_in_proportion_and_every_schedule_holds_the_rate(scheduler: str) -> None:
    """Lightning's finder sets one rate for all groups, and LambdaLR undoes it in the next step."""
    everything.clear()
    plain, found, search = Rates(), Rates(), finder()
    trainer([plain], max_epochs=2).fit(Toy("init", scheduler), data(), data())
    everything.clear()
    trainer([found, search], max_epochs=2).fit(Toy("init", scheduler), data(), data())
    control, tested = everything[:12], everything[12:-8]
    assert {rate for group in control for rate in group} == {0.0}
    rates = list(dict.fromkeys(group[0] for group in tested))
    assert rates == pytest.approx(rates_to_try(LOW, HIGH)[: len(rates)])
    assert rates == [row[0] for row in search.compared]
    assert {round(group[1] / group[0], 6) for group in tested} == {1.0 if scheduler == "one_cycle" else 0.5}
    assert search.suggestion is not None
    scale = search.suggestion / 1e-2  # the rate that the module was written with
    assert len(found.seen) == len(plain.seen) == 8
    for ours, theirs in zip(found.seen, plain.seen):
        assert ours == pytest.approx([rate * scale for rate in theirs])


def test_everything_but_the_rate_is_as_before(tmp_path: Path) -> None:
    states: list[Any] = []

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            states.append(_everything(trainer, pl_module))

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            states.append(_everything(trainer, pl_module))

    search = finder(apply=False, plot=str(tmp_path / "rates.png"), num_steps=14, max_lr=0.1)
    run = trainer([Spy(), search], accumulate_grad_batches=2)
    run.fit(Noisy("init", "sequential"), data(12), data())  # three batches: the data is begun anew
    before, after = states[0], states[-3]
    assert after["step"] == 0
    for state in (before, after):
        del state["loops"], state["callbacks"]
    assert_equal(before, after)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.png"]
    picture = Image.open(tmp_path / "rates.png").convert("RGB")
    assert (np.asarray(picture) == (214, 39, 40)).all(-1).sum() > 100  # the suggestion's line


def test_without_applying_it_the_run_is_a_plain_one_shuffling_included() -> None:
    def fit(*callbacks: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        trainer([*callbacks]).fit(module := Noisy(), data(shuffle=True), data())
        return weights(module)

    assert_equal(fit(), fit(finder(apply=False)))


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("guard", [False, True])
def test_divergence_ends_a_trial(guard: bool) -> None:
    def steps(**arguments: Any) -> tuple[LRFinder, dict[float, int]]:
        everything.clear()
        search = finder(min_lr=1e-3, max_lr=1e9, num_steps=20, apply=False, **arguments)
        trainer([Rates(), search, *([NonFiniteGuard()] if guard else [])]).fit(Toy(), data(), data())
        return search, Counter(rates[0] for rates in everything)

    search, full = steps(early_stop_threshold=None)
    assert search.suggestion is not None
    assert LOW < search.suggestion < 1
    assert search.compared[0][:2] == (1e9, -math.inf)
    assert full[1e9] < 20  # the loss is infinite
    early, short = steps()
    assert early.suggestion == search.suggestion
    assert sum(short.values()) < sum(full.values())


class Asserts(Toy):
    """The toy that raises its own error for a loss that is not finite, or that is large."""

    broken_at = -1  # a batch whose data is wrong

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if not output["loss"] < 100 or self.broken_at == self.global_step:
            raise ValueError("the loss is out of bounds")
        return output


def test_an_error_that_the_module_raises_for_a_large_loss_ends_the_trial() -> None:
    search = finder(min_lr=1e-3, max_lr=1e9, num_steps=20, early_stop_threshold=None)
    trainer([search]).fit(module := Asserts(), data(), data())
    assert search.compared[0][:2] == (1e9, -math.inf)
    assert search.suggestion is not None
    assert LOW < search.suggestion < 1
    module.broken_at = 3  # with initial weights, too
    with pytest.raises(ValueError, match="out of bounds"):
        trainer([finder()]).fit(module, data(), data())


class Skips(Toy):
    """Return no loss for some batches."""

    skipped: Collection[int] = (0, 2)
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        output = super().training_step(batch, batch_idx)
        return None if self.steps - 1 in self.skipped else output


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_left_out() -> None:
    search = finder(num_steps=20)
    trainer([search]).fit(Skips(), data(), data())
    assert search.suggestion is not None
    never = Skips()
    never.skipped = range(2, 1000)
    with pytest.raises(ConfigurationError, match=r"from which no rate .*: training_step returned no loss in the other"):
        trainer([finder(num_steps=50)]).fit(never, data(), data())


def test_a_step_s_loss_is_that_of_its_tokens_however_its_micro_batches_lie() -> None:
    whole, parts = finder(), finder()
    trainer([whole]).fit(Toy(), data(12, 12), data())
    trainer([parts, TokenWeightedAccumulation()], accumulate_grad_batches=2).fit(Toy(), data(12, 8), data())
    for ours, theirs in zip(parts.compared, whole.compared, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_nothing_is_said_of_what_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer([finder(), GradualUnfreezing(every_n_steps=2)], max_steps=2).fit(Toy(), data(), data())
    assert "LRFinder: suggests" in caplog.text
    assert " thaws" not in caplog.text


def test_a_resumed_run_does_not_test_again(tmp_path: Path) -> None:
    first = finder()
    run = trainer([first])
    run.fit(Toy("init", "lambda"), data(), data())
    run.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    everything.clear()
    rates, again = Rates(), finder(max_lr=0.5)
    trainer([rates, again], max_epochs=2).fit(Toy("init", "lambda"), data(), data(), ckpt_path=tmp_path / "half.ckpt")
    assert len(everything) == 4
    assert (again.suggestion, again.compared) == (first.suggestion, first.compared)
    assert rates.seen[0] == pytest.approx([first.suggestion / 5, first.suggestion / 10])


def test_what_cannot_work_is_refused() -> None:
    for arguments, message in (
        ({"min_lr": 1.0, "max_lr": 0.1}, "min_lr must be above 0 and below 0.1, got 1.0"),
        ({"num_steps": 2}, "num_steps must be a whole number of at least 10, got 2"),
        ({"early_stop_threshold": 1.0}, "early_stop_threshold must be above 1 or null, got 1.0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            LRFinder(**arguments)
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        trainer([LRFinder()]).fit(Toy(optimizers=2), data(), data())


@pytest.mark.turns(6, family="ranks")
def test_processes_agree(tmp_path: Path) -> None:
    run_ranks(_agree, tmp_path)


def _agree() -> None:
    search = finder()
    trainer([search], devices=2, strategy="ddp").fit(module := Toy(), data(32), data())
    first, second = everyones([search.suggestion, search.compared, weights(module)])
    assert_equal(first, second)
    assert len(search.compared) > 2


def test_a_sparse_buffer_is_put_back_and_the_rate_of_swa_is_scaled() -> None:
    class Graph(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(8).to_sparse())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=5e-4, anneal_epochs=1)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    search = finder(max_lr=1.0)
    run = trainer([search])
    run.fit(module := Graph(), data(), data())
    assert search.suggestion is not None
    group = run.optimizers[0].param_groups[0]
    assert group["swa_lr"] == pytest.approx(0.5 * search.suggestion)
    assert torch.equal(module.adjacency.to_dense(), torch.eye(8))


class WarmsUp(Toy):
    """Set the rate in ``optimizer_step``, as in the warm-up of Lightning's documentation."""

    before = False  # of the optimizer's step, instead of after it

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 1e-2, "nested": {"learning_rate": 1e-2, "weight_decay": 1e-2}})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if not self.before:
            optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 500) * self.hparams["lr"]
        if self.before:
            optimizer.step(closure=optimizer_closure)


def test_rates_that_the_module_sets_are_read_back_and_hyper_parameters_follow() -> None:
    search = finder()
    with pytest.warns(
        UserWarning, match=r"step 2 should have the rate .* but it is .*: optimizer_step or another hook of WarmsUp"
    ):
        trainer([search], max_steps=3).fit(module := WarmsUp(), data(), data())
    assert search.suggestion is not None
    assert module.hparams["lr"] == module.hparams["nested"]["learning_rate"] == search.suggestion
    assert module.hparams["nested"]["weight_decay"] == 1e-2
    assert search.taken == pytest.approx(search.suggestion / 500)
    early = WarmsUp()
    early.before = True
    with pytest.raises(
        ConfigurationError, match=r"the optimizer steps with .*or another hook of WarmsUp, or a callback"
    ):
        trainer([finder()]).fit(early, data(), data())


def test_a_rate_that_is_taken_is_read_from_the_optimizer() -> None:
    search = finder()
    trainer([search], max_steps=3).fit(Toy("init", "lambda"), data(), data())
    assert search.taken == pytest.approx(search.suggestion)
    assert max(search.compared, key=lambda row: row[1])[0] == pytest.approx(search.suggestion * math.sqrt(3))


class NoObjective(Toy):
    """Return a loss that does not fall, as in reinforcement learning."""

    constant = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)["loss"]
        return (output - output.detach()) * (0 if self.constant else 1) + torch.randn(())


@pytest.mark.parametrize("constant", [False, True])
def test_a_loss_that_does_not_depend_on_the_rate_is_refused(constant: bool) -> None:
    module = NoObjective()
    module.constant = constant
    with pytest.raises(ConfigurationError, match=r"lower the loss by 0 .* as in reinforcement learning"):
        trainer([finder(num_steps=20)]).fit(module, data(), data())


def test_a_refusal_of_a_rate_that_is_only_reported_does_not_end_the_run(tmp_path: Path) -> None:
    run = trainer([search := finder(apply=False)])
    with pytest.warns(UserWarning, match=r"LRFinder: 12 steps at the best rate .* lower the loss by 0 "):
        run.fit(NoObjective(), data(), data())
    assert (run.global_step, search.suggestion) == (4, None)
    run.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    again = trainer([finder(apply=False)], max_epochs=2)
    again.fit(NoObjective(), data(), data(), ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == 8


@pytest.mark.parametrize("fall", [0.1, 1.0])
def test_a_fall_within_the_noise_is_refused(fall: float) -> None:
    noise = random.Random(0)
    untrained = [3 + noise.gauss(0, 1) for _ in range(60)]
    trials = {0.0: untrained}
    for rate in rates_to_try(1e-3, 1.0):  # the best is 1 / 9
        share = math.exp(-abs(math.log(rate * 9)))
        trials[rate] = [loss - fall * share + noise.gauss(0, 0.5) for loss in untrained]
    if fall == 0.1:
        with pytest.raises(
            ConfigurationError, match=r"not more than 3 times the standard error .* \(num_steps\) or lar"
        ):
            suggest_lr(trials)
    else:
        assert suggest_lr(trials) == pytest.approx(1 / 9 / math.sqrt(3))


def test_a_best_rate_at_an_end_of_the_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"improves up to the end of the range.*: raise max_lr above 0.001"):
        trainer([LRFinder(min_lr=1e-5, max_lr=1e-3, num_steps=12)]).fit(Toy(), data(), data())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "optimizer", "batch", "seed"),
    [
        ("tanh", "AdamW", 4, 6),
        ("tanh", "SGD", 8, 2),
        ("tanh", "SGD", 8, 7),
        ("gpt", "AdamW", 4, 7),
        ("digits", "SGD", 4, 0),
    ],
)
def test_the_suggestion_is_near_the_best_rate_of_a_grid(task: str, optimizer: str, batch: int, seed: int) -> None:
    """The first four runs got a rate more than ten times below or three times above the best one, taken alone."""
    rate, reason = suggested(task, optimizer, batch, seed, steps=100)
    best, _ = best_rate(task, optimizer, batch, seed)
    assert rate is not None, reason
    assert best / 10 <= rate <= 3 * best

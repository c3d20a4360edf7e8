"""SpikeGuard: spikes are those of a slow reference, never reach the weights, are counted, and resume bit-exactly."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import (
    EMA,
    ConfigurationError,
    ConflictError,
    DivergedError,
    ExactResume,
    ScheduleFree,
    ScheduleFreeAdamW,
    SpikeGuard,
)
from lit_efficient.callbacks.spike_guard import is_spike
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Toy, assert_equal, data, trainer


class Watched(lit_efficient.SpikeGuard):
    """Notes what it looked at."""

    def __init__(
        self, action: Any = "skip", sigmas: float = 6.0, window: int = 128, max_consecutive: int = 10,
        every_n_steps: int = 100,
    ) -> None:  # fmt: skip
        super().__init__(action, sigmas, window, max_consecutive, every_n_steps)
        self.seen: list[dict[str, float]] = []

    def _values(self, *args: Any) -> dict[str, float]:
        self.seen.append(super()._values(*args))
        return self.seen[-1]


Watched.__name__ = Watched.__qualname__ = "SpikeGuard"


def spikes_of(seen: list[dict[str, float]], sigmas: float, window: int) -> list[int]:
    """A slow reference: the steps that must be left out."""
    history: dict[str, list[float]] = {}
    out = []
    for number, values in enumerate(seen):
        spike = False
        for name, value in values.items():
            past = history.setdefault(name, [])[-window:]
            if len(past) >= max(2, window // 2):
                mean = statistics.mean(past)
                spike |= value > mean + sigmas * max(statistics.stdev(past), 1e-3 * abs(mean))
        if spike:
            out.append(number)
        else:
            for name, value in values.items():
                history[name].append(value)
    return out


def leaves_out_what_a_slow_reference_does(run: Run) -> None:
    guard = run.technique("SpikeGuard")
    assert guard.seen
    assert guard.spikes == len(spikes_of(guard.seen, guard.sigmas, guard.window))


ROW = Row(
    lambda: Watched(sigmas=1e6, window=2),  # a step that is left out is one that others wait for in vain
    leaves_out_what_a_slow_reference_does,
    lambda: SpikeGuard(sigmas=1e30, window=2),
    changes=False,
)


class Line(pl.LightningModule):
    """Its loss is 1 but for a little noise, and at the batches in ``bad`` some times as much."""

    def __init__(self, bad: tuple[int, ...] = (), factor: float = 100.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.bad, self.factor = bad, factor
        self.history: list[dict[str, Any]] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch_idx = int(batch[0, 0])
        loss = (self.layer(batch) - 1).square().mean() + 1
        return loss * (self.factor if batch_idx in self.bad else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state_dict()["state"]
        copies = {f"{i}/{key}": value.clone() for i, one in state.items() for key, value in one.items()}
        self.history.append(copies | {name: tensor.clone() for name, tensor in self.state_dict().items()})
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # which computes each rate from the last
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        torch.manual_seed(1)
        rows = torch.randn(48, 4)
        rows[:, 0] = torch.arange(48) // 4  # the batch's number
        return DataLoader(rows, 4)


def fit(module: Any, *parts: Any, ckpt_path: Any = None, **arguments: Any) -> Any:
    run = trainer(parts, limit_val_batches=0, **arguments)
    run.fit(module, ckpt_path=ckpt_path)
    return run


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_left_out_changes_nothing_and_is_counted(accumulate: int) -> None:
    module, guard = Line(bad=(8, 9)), Watched(window=4)
    with pytest.warns(
        UserWarning, match=r"SpikeGuard: spike at step \d: loss .* and gradient norm .*; the step is skipped"
    ):
        fit(module, guard, accumulate_grad_batches=accumulate)
    out = spikes_of(guard.seen, 6.0, 4)
    assert out == ([8, 9] if accumulate == 1 else [4])
    assert guard.spikes == len(out)
    assert 1 < guard.seen[0]["loss"] < 10  # of all micro-batches, not divided by their number
    last = [(number + 1) * accumulate - 1 for number in out]  # its batch
    for batch in last:
        before, after = module.history[batch - accumulate], module.history[batch]
        assert all(torch.equal(before[n], after[n]) for n in before if "running" not in n and "num_b" not in n)
    moved = module.history[last[0] - accumulate], module.history[-1]
    assert not torch.equal(moved[0]["layer.0.weight"], moved[1]["layer.0.weight"])


def test_going_back_restores_weights_buffers_and_states_and_leaves_the_schedule_alone() -> None:
    module, plain = Line(bad=(8,)), Line()
    guard = SpikeGuard("rewind", window=4, every_n_steps=3)
    with pytest.warns(UserWarning, match=r"spike at step 8: .*; returned to the state of step 6"):
        fit(module, guard)
    fit(plain, pl.Callback())
    buffers = {name for name, _ in module.named_buffers()}
    for name, value in module.history[8].items():  # kept when the loss of step 6 had shown that its weights were good
        assert torch.equal(value, module.history[6 if name in buffers else 5][name]), name
    assert not torch.equal(module.history[7]["layer.0.weight"], module.history[8]["layer.0.weight"])
    assert module.rates == plain.rates
    assert guard.spikes == 1


class Unscheduled(Line):
    """With weights that switch, and counts in the optimizer's groups."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        (group,) = self.trainer.optimizers[0].param_groups
        self.history[-1]["counts"] = torch.tensor([group["steps"], group["weight_sum"]])

    def configure_optimizers(self) -> Any:
        return ScheduleFreeAdamW(self.parameters(), 1e-2)


@pytest.mark.filterwarnings("ignore:SpikeGuard")
def test_going_back_leaves_switched_weights_in_training_and_takes_counts_along() -> None:
    module = Unscheduled(bad=(8,))
    fit(module, SpikeGuard("rewind", window=4, every_n_steps=3), ScheduleFree())
    buffers = {name for name, _ in module.named_buffers()}
    for name, value in module.history[8].items():
        assert name in buffers or torch.equal(value, module.history[5][name]), name
    assert not torch.equal(module.history[9]["layer.0.weight"], module.history[8]["layer.0.weight"])


def test_what_lasts_is_no_spike() -> None:
    module = Line(bad=tuple(range(5, 12)))
    with (
        pytest.warns(UserWarning, match="SpikeGuard"),
        pytest.raises(DivergedError, match=r"spike at step 8: .* after 3 consecutive skipped steps"),
    ):
        fit(module, SpikeGuard(window=4, max_consecutive=3))


@pytest.mark.filterwarnings("ignore:SpikeGuard")
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_resumes_bit_exactly_before_and_after_a_spike(action: Any, tmp_path: Path) -> None:
    def end(ckpt_path: Path | None) -> Any:
        parts = [SpikeGuard(action, window=4, every_n_steps=3), EMA(decay=0.5), ExactResume(0), Saves(tmp_path)]
        fit(Line((8,)), *parts, ckpt_path=ckpt_path, max_epochs=2)
        return torch.load(tmp_path / "24.ckpt", weights_only=True)

    whole = end(None)
    for start in (7, 9):  # the spikes are at step 8 and 20
        resumed = end(tmp_path / f"{start}.ckpt")
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_equal(whole[part], resumed[part], part)
        assert_equal(whole["callbacks"]["SpikeGuard"], resumed["callbacks"]["SpikeGuard"])
    assert whole["callbacks"]["SpikeGuard"]["spikes"] >= 2


def test_resumed_within_a_window_it_knows_the_losses_before(tmp_path: Path) -> None:
    def history(ckpt_path: Path | None) -> Any:
        guard, file = SpikeGuard(window=4), tmp_path / "within.ckpt"

        def save(run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and ckpt_path is None:  # the third micro-batch of the first window
                run.save_checkpoint(file)

        saves = pl.callbacks.LambdaCallback(on_train_batch_end=save)
        fit(Line(), guard, ExactResume(0), saves, ckpt_path=ckpt_path, accumulate_grad_batches=4)
        assert "losses" not in guard.state_dict()
        return guard.state_dict()["history"]

    whole = history(None)
    assert len(whole) == 2
    assert history(tmp_path / "within.ckpt") == whole


class Saves(pl.Callback):
    """After each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt", weights_only=False)


def test_several_optimizers_have_histories_of_their_own_and_cannot_go_back() -> None:
    guard = Watched(window=2, sigmas=1e9)
    trainer([guard]).fit(Toy(optimizers=2), data(), data())
    assert sorted(guard.state_dict()["history"]) == ["0/gradient norm", "0/loss", "1/gradient norm"]
    with pytest.raises(ConflictError, match="SpikeGuard: action='rewind' supports one optimizer, but T"):
        trainer([SpikeGuard("rewind")]).fit(Toy(optimizers=2), data(), data())


def test_what_is_not_finite_and_what_is_flat_is_no_spike() -> None:
    assert not is_spike(float("inf"), [1.0, 1.0, 1.1])
    assert not is_spike(float("nan"), [1.0, 1.0, 1.1])
    assert not is_spike(1.0 + 1e-6, [1.0] * 8)
    assert is_spike(1.01, [1.0] * 8)
    assert not is_spike(5.0, [1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "stop"}, "action must be one of skip, rewind, got 'stop'"),
        ({"sigmas": 0}, "sigmas must be above 0, got 0"),
        ({"window": 1}, "window must be a whole number of at least 2, got 1"),
        ({"max_consecutive": 0}, "max_consecutive must be a whole number of at least 1, got 0"),
        ({"every_n_steps": 0.5}, "every_n_steps must be a whole number of at least 1, got 0.5"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SpikeGuard: {message}"):
        SpikeGuard(**arguments)

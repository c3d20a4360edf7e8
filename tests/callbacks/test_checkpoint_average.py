"""CheckpointAverage equals the mean of the weights it names, with statistics of BatchNorm that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient import CheckpointAverage, ConfigurationError, ConflictError
from lit_efficient.mechanisms.averages.weights import position_weights
from tests.callbacks.test_ema import Trace
from tests.support import Toy, assert_equal, data, trainer, weights


class Normed(Toy):
    def _build(self) -> None:
        built = self.net is not None
        super()._build()
        if not built:
            self.net.head = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5), self.net.head)


def fit(average: CheckpointAverage, module: Any = None, **arguments: Any) -> tuple[Any, Trace]:
    torch.manual_seed(0)
    trace = Trace()
    run = trainer([average, trace], **{"max_epochs": 3, **arguments})
    run.fit(module or Toy(), data(), data())
    return run, trace


@pytest.mark.parametrize("kind", ["uniform", "linear", "exponential"])
def test_validation_uses_the_weighted_mean_of_the_last_snapshots(kind: str) -> None:
    run, trace = fit(CheckpointAverage(last_k=3, every_n_steps=2, weights=kind))
    snapshots, shares = [trace.steps[i] for i in (7, 9, 11)], position_weights(3, kind)
    expected = {n: sum(w * s[n] for w, s in zip(shares, snapshots)) for n in snapshots[0]}
    torch.testing.assert_close(trace.used["validate"], expected)
    assert_equal(trace.steps[-1], weights(run.lightning_module))


def test_all_snapshots_in_the_memory_of_one() -> None:
    average = CheckpointAverage(last_k=None, every_n_steps=1, start_step=4)
    _, trace = fit(average)
    expected = {n: torch.stack([s[n] for s in trace.steps[4:]]).mean(0) for n in trace.steps[0]}
    torch.testing.assert_close(trace.used["validate"], expected)
    assert len(average._snapshots) == 1


def test_statistics_are_those_of_the_average_and_training_never_notices(tmp_path: Path) -> None:
    class Plain(Normed):
        pass

    torch.manual_seed(0)
    run = trainer(max_epochs=3)
    run.fit(plain := Plain(), data(shuffle=True), data())
    torch.manual_seed(0)
    average = CheckpointAverage(last_k=4, every_n_steps=1)
    trace = Trace()
    run = trainer([average, trace], max_epochs=3)
    run.fit(module := Normed(), data(shuffle=True), data())
    assert_equal(weights(plain), weights(module))
    assert module.net.head[0].momentum == 0.1

    used = trace.used["validate"]
    twin = Normed()
    twin.load_state_dict(used)
    norm = twin.net.head[0]
    x = data().dataset.tensors[0]
    hidden = twin.net.stem(x)
    for block in twin.net.blocks:
        hidden = block(hidden)
    torch.testing.assert_close(norm.running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(module.net.head[0].running_mean, hidden.mean(0), rtol=1e-2)
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert_equal(checkpoint["state_dict"], used)
    assert checkpoint["lit_efficient"]["weights"] == "average"


def test_batch_norm_without_suitable_data_or_step_is_refused() -> None:
    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            yield from data().dataset

    with pytest.raises(ConfigurationError, match=r"BatchNorm, .* DataLoader over Rows; use GroupNorm"):
        trainer([CheckpointAverage(every_n_steps=1)], max_steps=4, max_epochs=-1, val_check_interval=4).fit(
            Normed(), DataLoader(Rows(), batch_size=4), data()
        )
    with pytest.raises(ConflictError, match="Normed: it optimizes manually"):
        fit(CheckpointAverage(), Normed(optimizers=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last_k": 0}, "CheckpointAverage: last_k must be a whole number of at least 1 or null, got 0"),
        ({"every_n_steps": 0}, "CheckpointAverage: every_n_steps must be a whole number of at least 1, got 0"),
        ({"weights": "log"}, "weights must be one of uniform, linear, exponential, got 'log'"),
        ({"last_k": None, "weights": "linear"}, "weights must be uniform without last_k, .*, got 'linear'"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, got -1"),
        ({"bn_batches": 0}, "bn_batches must be a whole number of at least 1, got 0"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CheckpointAverage(**arguments)


class Cyclic(Toy):
    """A rate that falls from 1e-2 to 1e-3 within each cycle of four steps, as in SWA's paper."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.3 * (step % 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.states.append({name: p.detach().clone() for name, p in self.named_parameters()})


def test_swa_averages_the_ends_of_cycles_and_leaves_the_rate_alone() -> None:
    plain, module = Cyclic(), Cyclic()
    trainer(max_epochs=5).fit(plain, data(), data())
    average = CheckpointAverage(last_k=None, every_n_steps=4, start_step=10)
    trainer([average], max_epochs=5).fit(module, data(), data())
    assert module.rates == plain.rates
    assert_equal(module.states, plain.states)
    ends = [module.states[step - 1] for step in (12, 16, 20)]  # each after the step of the lowest rate
    mean = {name: torch.stack([state[name] for state in ends]).mean(0) for name in ends[0]}
    torch.testing.assert_close(dict(average.average(module)), mean, rtol=1e-5, atol=1e-6)

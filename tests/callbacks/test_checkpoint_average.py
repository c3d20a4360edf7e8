"""CheckpointAverage equals the mean of the weights it names, with statistics of BatchNorm that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchmetrics import SumMetric

from lit_efficient import CheckpointAverage, ConfigurationError, ConflictError
from lit_efficient.mechanisms.averages.weights import position_weights
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler, keyed_loader
from tests.callbacks.test_ema import Trace
from tests.support import Toy, assert_equal, data, trainer, weights


class Normed(Toy):
    def _build(self) -> None:
        built = self.net is not None
        super()._build()
        if not built:
            self.net.head = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5), self.net.head)


def normed_input(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What reaches the BatchNorm layer from all data, in a network of these weights."""
    twin = Normed()
    twin.load_state_dict(state)
    hidden = twin.net.stem(data().dataset.tensors[0])
    for block in twin.net.blocks:
        hidden = block(hidden)
    return hidden.detach()


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
    hidden = normed_input(used)
    torch.testing.assert_close(used["net.head.0.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(module.net.head[0].running_mean, hidden.mean(0), rtol=1e-2)
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert_equal(checkpoint["state_dict"], used)
    assert checkpoint["lit_efficient"]["weights"] == "average"


def test_passes_for_the_statistics_leave_nothing_in_the_module() -> None:
    class Carries(Normed):
        """Counts, draws and carries a state in its training step, and logs a metric object of each epoch."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.samples, self.generator = SumMetric(), torch.Generator().manual_seed(1)
            self.register_buffer("carried", torch.zeros(()))
            self.history: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.carried.add_(torch.rand((), generator=self.generator))
            self.history.append(float(self.carried))
            self.samples(len(batch))
            self.log("samples", self.samples, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    ends = []
    for callbacks in ([], [CheckpointAverage(last_k=2, every_n_steps=1)]):
        torch.manual_seed(0)
        run = trainer(callbacks, max_epochs=2, val_check_interval=2)
        run.fit(module := Carries(), data(shuffle=True), data())
        ends.append([run.callback_metrics["samples"].item(), module.history, module.carried.item()])
        ends[-1] += [module.generator.get_state().tolist()]
    assert ends[0] == ends[1]


class Keyed(Dataset):
    def __getitem__(self, key: tuple[int, int]) -> Any:
        return data().dataset[key[0]]


def test_statistics_come_from_loaders_of_whole_batches_too() -> None:
    loader = keyed_loader(Keyed(), KeyedBatchSampler(range(16), 4), default_collate)
    run = trainer([CheckpointAverage(every_n_steps=1), trace := Trace()], max_epochs=1)
    run.fit(Normed(), loader, data())
    used = trace.used["validate"]
    torch.testing.assert_close(used["net.head.0.running_mean"], normed_input(used).mean(0), rtol=1e-4, atol=1e-5)


def test_batch_norm_without_suitable_data_or_step_is_refused() -> None:
    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            yield from data().dataset

    with pytest.raises(ConfigurationError, match=r"BatchNorm layers, .* DataLoader over Rows\. Use such"):
        trainer([CheckpointAverage(every_n_steps=1)], max_steps=4, max_epochs=-1, val_check_interval=4).fit(
            Normed(), DataLoader(Rows(), batch_size=4), data()
        )
    with pytest.raises(ConflictError, match="Normed uses manual optimization"):
        fit(CheckpointAverage(), Normed(optimizers=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last_k": 0}, "CheckpointAverage: last_k must be a whole number of at least 1 or null, got 0"),
        ({"every_n_steps": 0}, "CheckpointAverage: every_n_steps must be a whole number of at least 1, got 0"),
        ({"weights": "log"}, "weights must be one of uniform, linear, exponential, got 'log'"),
        ({"last_k": None, "weights": "linear"}, "weights must be uniform if last_k is null, got 'linear'"),
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

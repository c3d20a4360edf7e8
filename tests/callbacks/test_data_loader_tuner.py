"""DataLoaderTuner picks by cost, keeps order, draws and every state, and leaves alone what would not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from lit_efficient import ConfigurationError, DataLoaderTuner, ExactResume
from lit_efficient.callbacks.data_loader_tuner import Loading, pick, seconds_a_batch
from lit_efficient.mechanisms.rewind import random_states, same_random_states
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Toy, assert_equal, trainer, weights

CPU = torch.device("cpu")


def measures_every_training_loader(run: Run) -> None:
    (technique,) = (one for one in run.trainer.callbacks if isinstance(one, DataLoaderTuner))
    assert technique.chosen == [Loading()] * (2 if run.technique("MaxBatchSize") else 1)  # one of each size


def cheap() -> DataLoaderTuner:
    return DataLoaderTuner(workers=[0], batches=1)


ROW = Row(cheap, measures_every_training_loader, neutral=cheap, changes=False)


class Numbers(Dataset[Any]):
    def __init__(self, draws: str = "") -> None:
        self.rows, self.draws = torch.randn(12, 16, generator=torch.Generator().manual_seed(3)), draws
        self.own = np.random.default_rng(0) if draws == "own" else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.own is not None:
            return [self.rows[index] + self.own.random(dtype=np.float32)]
        drawn = torch.rand(16) + random.random() + np.random.rand() if self.draws else 0.0
        return [(self.rows[index] + drawn).float()]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for row in torch.randn(8, 16, generator=torch.Generator().manual_seed(3)):
            yield [row]


class Noting(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0].clone())
        self.drawn.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def tuner(best: Loading | None = None, **arguments: Any) -> DataLoaderTuner:
    """One to which ``best`` seems fastest, without reading anything; ``None``: which reads, and believes its clock."""
    technique = DataLoaderTuner(**{"workers": [0, 2], "batches": 1, **arguments})
    if best is not None:
        technique._cost = lambda loader, loading, *_: float(
            sum(getattr(loading, name) != getattr(best, name) for name in ("num_workers", "prefetch_factor"))
        )
    return technique


def fit(*callbacks: Any, data: Any = None, path: Any = None, **options: Any) -> Noting:
    module = Noting()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    loader = DataLoader(data or Numbers(), 2, shuffle=True) if data is None or isinstance(data, Dataset) else data
    run = trainer(callbacks, **{"limit_val_batches": 0, "max_steps": -1, **options})
    run.fit(module, loader, loader, ckpt_path=path, weights_only=True if path else None)
    return module


def equal(one: Noting, other: Noting) -> None:
    assert_equal(one.batches, other.batches)
    assert one.drawn == other.drawn
    assert_equal(weights(one), weights(other))


def test_the_fastest_is_picked_and_of_equals_the_simplest() -> None:
    def cost(loading: Loading) -> float:
        seconds = {0: 10.0, 1: 10.5, 2: 6.0, 4: 5.5, 8: math.inf}[loading.num_workers]
        return seconds - (1.0 if loading.prefetch_factor == 4 else 0.0) - (0.1 if loading.pin_memory else 0.0)

    numbers = [0, 1, 2, 4, 8]
    choice, costs = pick(Loading(), numbers, [2, 4], [False, True], 0.1, cost)
    assert choice == Loading(2, 4, False)  # 4 workers are 8 %, pinning 2 % faster: too little
    assert len(costs) == 5 + 1 + 1
    assert pick(Loading(), numbers, [2, 4], [False, True], 0.0, cost)[0] == Loading(4, 4, True)
    assert pick(Loading(2, 2), [], [2], [], 0.1, lambda _: math.inf)[0] == Loading(2, 2)  # nothing runs
    assert pick(Loading(8, 2), numbers, [2], [], 0.1, cost)[0] == Loading(2, 2)  # which does not run


def test_first_batches_of_workers_are_not_timed() -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    loader = DataLoader(Numbers(), 2)
    assert seconds_a_batch(loader, Loading(), 3, CPU, lambda: next(ticks)) == pytest.approx(7 / 3)
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    assert seconds_a_batch(loader, Loading(2, 2), 2, CPU, lambda: next(ticks)) == pytest.approx((7 - 1) / 2)
    ticks = iter([0.0, 1.0])
    assert seconds_a_batch(DataLoader(Numbers(), 6), Loading(), 8, CPU, lambda: next(ticks)) == 1.0
    assert seconds_a_batch(DataLoader(Numbers(), 12), Loading(), 8, CPU, lambda: 0.0) == math.inf  # one is no rate


class Counting(RandomSampler):
    """Remembers how often it was begun."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return super().__iter__()


@pytest.mark.parametrize("workers", [0, 1])
def test_measuring_leaves_every_state_as_it_was(workers: int) -> None:
    data = Subset(Numbers("own"), range(10))
    sampler = Counting(data, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(data, 2, sampler=sampler, generator=torch.Generator().manual_seed(8))
    assert loader.generator is not None
    before = random_states(), sampler.generator.get_state(), loader.generator.get_state()
    own = data.dataset.own.bit_generator.state  # type: ignore[attr-defined]
    assert seconds_a_batch(loader, Loading(workers, 2 if workers else None), 2, CPU, lambda: 0.0) == 0.0
    assert same_random_states(before[0], random_states())
    assert torch.equal(sampler.generator.get_state(), before[1])
    assert torch.equal(loader.generator.get_state(), before[2])
    assert data.dataset.own.bit_generator.state == own  # type: ignore[attr-defined]
    assert sampler.begun == 0
    assert (loader.num_workers, loader._iterator) == (0, None)


SAMPLED = [[3, 1], [0], [7, 2, 5], [4]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 2, shuffle=True),
        lambda: DataLoader(Numbers(), batch_sampler=SAMPLED),
        lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, drop_last=True)),
        lambda: DataLoader([[row] for row in torch.ones(3, 2, 16)], batch_size=None),  # type: ignore[arg-type]
    ],
    ids=["shuffled", "batch_sampler", "random_batches", "no_batch_size"],
)
@pytest.mark.filterwarnings("ignore:ExactResume. resuming will not be bit-exact. the order of list in list")
@pytest.mark.parametrize("seeded", [True, False])
def test_order_and_draws_are_those_without_it(make: Any, seeded: bool) -> None:
    more = [ExactResume(seed=1)] if seeded else []
    technique = tuner(Loading(2, 4))
    ours = fit(technique, *more, data=make())
    assert technique.chosen == [Loading(2, 4)]
    equal(ours, fit(*([ExactResume(seed=1)] if seeded else []), data=make()))


def test_it_really_reads_and_changes_nothing() -> None:
    technique = tuner(workers=[0, 1], prefetch=[2])
    equal(fit(technique), fit())
    assert len(technique.chosen) == 1


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_may_pick_another_one(tmp_path: Path) -> None:
    path, data = tmp_path / "four.ckpt", "global"  # draws, which ExactResume seeds
    whole = fit(ExactResume(seed=5), data=Numbers(data), max_epochs=2)
    first = fit(tuner(Loading(2, 2)), ExactResume(seed=5), Saves(path), data=Numbers(data), max_epochs=2)
    equal(first, whole)
    technique = tuner(Loading(1, 4), workers=[1])
    rest = fit(ExactResume(seed=5), technique, data=Numbers(data), max_epochs=2, path=path)
    assert technique.chosen == [Loading(1, 4)]
    assert_equal(rest.batches, whole.batches[4:])
    assert rest.drawn == whole.drawn[4:]
    assert_equal(weights(rest), weights(whole))


def test_what_draws_keeps_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    for draws, more in (("global", []), ("own", []), ("own", [ExactResume(seed=1)])):
        with caplog.at_level("INFO"):
            ours = fit(technique := tuner(Loading(2, 4)), *more, data=Numbers(draws))
        assert technique.chosen == [Loading()]
        assert "Numbers draws random numbers in an order that depends on the number of workers" in caplog.text
        equal(ours, fit(*([ExactResume(seed=1)] if more else []), data=Numbers(draws)))


class Counted(Numbers):
    """Gives other rows the more often it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return [self.rows[index] + self.reads]


def test_data_that_changes_as_it_is_read_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        equal(fit(tuner(Loading(0, None)), data=Counted()), fit(data=Counted()))
    assert "it reads Counted, whose attribute reads changes when it is read" in caplog.text


class Own:
    """No loader of torch's."""

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(Numbers(), 2)

    def __len__(self) -> int:
        return 6


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {"place": 1}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (Own(), "a Own does not change, because it is not a DataLoader"),
        (Stateful(Numbers(), 2), "a Stateful does not change, because it has its own state or iterator"),
        (
            DataLoader(Stream(), 2),
            "a DataLoader does not change, because it reads Stream in this process, which would advance it",
        ),
    ],
    ids=["other", "stateful", "stream"],
)
def test_what_it_cannot_change_is_left_and_named(loader: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(technique := tuner(Loading(2, 4)), data=loader)
    assert why in caplog.text
    assert technique.chosen == []


def test_a_stream_with_workers_keeps_their_number() -> None:
    technique = tuner(Loading(0, 4))
    loader = DataLoader(Stream(), 2, num_workers=1)
    equal(fit(technique, data=loader), fit(data=DataLoader(Stream(), 2, num_workers=1)))
    assert technique.chosen == [Loading(1, 4)]


def test_several_loaders_are_each_measured() -> None:
    class Both(Noting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    technique = tuner(Loading(0))
    run = trainer([technique], limit_val_batches=0)
    loaders = {name: DataLoader(Numbers(), 2) for name in "ab"}
    run.fit(Both(), loaders, DataLoader(Numbers(), 2))
    assert technique.chosen == [Loading(), Loading()]
    assert "num_workers=0" in technique.describe(Both()).summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": [-1]}, "workers must be a whole number of at least 0 and at most 512, got -1"),
        ({"workers": []}, r"workers must be a list of numbers or null, got \[\]"),
        ({"prefetch": [0]}, "prefetch must be a whole number of at least 1, got 0"),
        ({"batches": 0}, "batches must be a whole number of at least 1, got 0"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"DataLoaderTuner: {message}"):
        DataLoaderTuner(**arguments)

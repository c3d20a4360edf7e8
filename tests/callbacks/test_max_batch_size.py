"""The batch-size finder: the size that it returns has run, and the search leaves no other traces."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_efficient import EMA, ConfigurationError, ConflictError, MaxBatchSize, TokenWeightedAccumulation
from lit_efficient.errors import OutOfMemoryError, parse_bytes
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler, keyed_loader
from lit_efficient.mechanisms.rewind import random_states
from lit_efficient.mechanisms.trials.batch_size import candidate_sizes, divisors, largest_fitting
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.mechanisms.trials.probes import sample_bytes
from lit_efficient.mechanisms.trials.steps import Trials
from tests.processes import run_ranks
from tests.ranks.toys import everyones
from tests.support import WIDTH, Toy, assert_equal, data, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Texts(Dataset[torch.Tensor]):
    """Rows of different lengths, one of which is much longer than the others."""

    def __init__(self, rows: int = 32, longest: int = 512) -> None:
        self.lengths = [16] * rows
        self.lengths[rows // 3] = longest

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), 0.1)


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class TextModule(L.LightningModule):
    """Module whose memory grows with the number of tokens. Validation needs ``extra`` times as much."""

    def __init__(self, extra: int = 1) -> None:
        super().__init__()
        self.extra = extra
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch[..., None]).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", torch.cat([self.net(batch[..., None]) * torch.ones(32)] * self.extra).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Texting(L.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Texts(), self.batch_size, shuffle=True, collate_fn=pad)

    def val_dataloader(self) -> Any:
        return DataLoader(Texts(), self.batch_size, collate_fn=pad)


def search(finder: MaxBatchSize, module: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer([finder], **arguments)
    run.fit(module or TextModule(), datamodule=Texting())
    return finder.found


def test_pure_functions() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert candidate_sizes("power", 100, 96) == [1, 3, 6, 12, 24, 48, 96]
    assert candidate_sizes("power", 100, 50) == [1, 5, 25, 50]
    for limit in range(1, 40):
        for sizes in (list(range(1, 40)), divisors(36), candidate_sizes("power", 39)):
            tried: list[int] = []
            best = largest_fitting(sizes, lambda size: tried.append(size) or size <= limit)  # noqa: B023
            assert best == max(size for size in sizes if size <= limit)
            assert best in tried
            assert len(tried) == len(set(tried))
    assert largest_fitting([4, 8], lambda size: False) is None
    assert (parse_bytes("1.5KiB"), parse_bytes("2 GB"), parse_bytes(7)) == (1536, 2_000_000_000, 7)


class _OwnList(list[Any]):
    """A list with attributes of its own, which torch's trees do not look into."""


@dataclasses.dataclass
class _Sample:
    tokens: torch.Tensor
    about: dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Slots:
    tokens: torch.Tensor
    words: set[str]


def test_the_bytes_of_a_sample_are_those_of_all_that_it_holds() -> None:
    row = torch.zeros(100, dtype=torch.int64)
    samples: list[Any] = [{"a": row}, [row], (row,), _OwnList([row]), OrderedDict(a=row), UserDict(a=row)]
    assert [sample_bytes(sample) for sample in samples] == [800] * 6
    assert sample_bytes(_OwnList([(row.numpy(), _OwnList([row]))])) == 1600
    assert sample_bytes(_Sample(row, {"text": "abcd"})) == 804
    assert sample_bytes(_Slots(row, {"abcd"})) == 804


def test_the_meter_counts_live_bytes_and_stops_in_the_middle_of_a_step() -> None:
    layer = nn.Linear(256, 256, bias=False)
    with AllocationMeter(layer.parameters()) as meter:
        assert meter.live == 256 * 256 * 4
        out = layer(torch.ones(64, 256))  # 64 KiB each: input and output
        assert meter.live == 4 * (256 * 256 + 2 * 64 * 256)
        out.sum().backward()
        assert meter.peak >= 4 * 2 * 256 * 256  # the gradient is made in C++, within backward
        del out
        layer.zero_grad()
        gc.collect()
        assert meter.live == 256 * 256 * 4
    hidden = torch.ones(64, 256, requires_grad=True)
    loss = (hidden @ layer.weight).sum()
    with pytest.raises(OutOfMemoryError, match="limit is 300000 bytes"), AllocationMeter([], 300_000):
        loss.backward()


@pytest.mark.parametrize("mode", ["power", "binary"])
def test_finds_the_largest_that_ran_on_the_longest_batch(mode: str) -> None:
    """The size follows from the longest row, although a random batch may not contain it."""
    peaks = {}
    whole = search(MaxBatchSize(mode=mode))
    assert (whole.size, whole.accumulation) == (16, 1)
    for trial in whole.trials:
        peaks[trial["size"]] = trial["peak_bytes"]
    assert peaks[16] > 16 * 512 * 32 * 4  # an activation of 32 features for each of the padded tokens
    budget = (peaks[8] + peaks[16]) // 2
    found = search(MaxBatchSize(mode=mode, margin=0.2, memory_limit=int(budget / 0.8) + 1))
    assert (found.size, found.accumulation) == (8, 2)
    assert found.peak_bytes <= budget < found.budget_bytes + 2
    ran = {trial["size"] for trial in found.trials if not trial["failed_in"]}
    assert found.size in ran
    assert max(ran) == found.size


def test_validation_counts_unlike_in_lightnings_finder() -> None:
    free = search(MaxBatchSize(include_validation=False), TextModule(8))
    budget = {trial["size"]: trial["peak_bytes"] for trial in free.trials}[8]
    blind = search(MaxBatchSize(include_validation=False, margin=0, memory_limit=budget), TextModule(8))
    seeing = search(MaxBatchSize(margin=0, memory_limit=budget), TextModule(8))
    assert blind.size == 8
    assert seeing.size < 8
    assert [trial["failed_in"] for trial in seeing.trials][-1] == "validation"


def test_out_of_memory_at_the_smallest_size_says_what_it_needs() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        search(MaxBatchSize(memory_limit=100_000))
    needed = int(str(caught.value).split(" bytes) in training")[0].split("(")[-1])
    assert "a batch of 1 needs" in str(caught.value)
    assert search(MaxBatchSize(margin=0, memory_limit=needed)).size == 1
    with pytest.raises(OutOfMemoryError):
        search(MaxBatchSize(margin=0, memory_limit=needed - 1))


def test_where_free_memory_is_unknown_a_limit_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is unknown on macOS and Windows."""
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(ConfigurationError, match="cannot be read on linux: set memory_limit"):
        search(MaxBatchSize())
    assert search(MaxBatchSize(memory_limit="1GiB")).size == 16


def _everything(run: Any, module: Any) -> dict[str, Any]:
    """Return all state that a search could change."""
    states = random_states()
    return {
        "weights": weights(module),
        "grads": [p.grad for p in module.parameters()],
        "modes": [part.training for part in module.modules()],
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "empty": [len(optimizer.state) for optimizer in run.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
        "torch": states["torch"],
        "python": list(states["python"]),
        "numpy": list(map(str, states["numpy"])),
        "loops": run.fit_loop.state_dict(),
        "step": run.global_step,
        "metrics": dict(run.callback_metrics),
        "logged": dict(run.logged_metrics),
        "callbacks": {cb.state_key: cb.state_dict() for cb in run.callbacks if not isinstance(cb, MaxBatchSize)},
        "stage": (run.training, run.should_stop, run.sanity_checking),
        "attributes": (module.steps, list(module.draws)),
    }


class Noisy(Toy):
    """Draw from every random generator, and have a state."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps, self.draws = 0, []
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.draws.append(random.random() + np.random.rand())
        noise = torch.rand(()) * self.draws[-1]
        return super().training_step([self.norm(batch[0]) + noise], batch_idx)


class Spy(Callback):
    """Record the state at the start of training, and count calls in trials."""

    def __init__(self) -> None:
        self.before: Any = None
        self.after: Any = None
        self.batches: list[int] = []
        self.validated = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = _everything(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(len(batch[0]))
        trials.append(len(batch[0]))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.after = self.after or (_everything(trainer, pl_module) if not self.batches else None)


trials: list[int] = []


def test_everything_is_bit_equal_to_before_and_callbacks_took_part(tmp_path: Path) -> None:
    trials.clear()
    spy, ema = Spy(), EMA(decay=0.5)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1)
    run = trainer(
        [spy, ema, checkpoint, MaxBatchSize(max_size=2, min_size=2)],
        logger=CSVLogger(tmp_path, "log", "0"),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        limit_train_batches=2,
        log_every_n_steps=1,
    )
    module = Noisy("init", "one_cycle")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    run.fit(module, data(shuffle=True), data())
    assert spy.before["empty"] == [0]
    assert trials == [2] * 4 + [2] * 4  # two windows of two micro-batches; then two real ones: the samples asked for
    assert spy.batches == [2] * 4  # the notes of a callback were put back
    assert module.steps == len(module.draws) == 4
    before, after = ({**state, "loops": None} for state in (spy.before, spy.after))
    assert_equal(before, after)
    saved = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    assert saved == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]
    assert len((tmp_path / "log" / "0" / "metrics.csv").read_text().splitlines()) <= 4
    assert not list(tmp_path.glob("snapshots"))


def test_equals_a_run_that_was_given_the_size_from_the_start() -> None:
    """The runs are equal bit for bit, with shuffling and noise, also if the loader has a generator of its own."""

    def fit(callbacks: list[Any], size: int, own: bool, **arguments: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loader = DataLoader(data().dataset, size, shuffle=True, generator=torch.Generator() if own else None)
        trainer(callbacks, **arguments).fit(module := Noisy(), loader, data())
        return weights(module)

    for own in (False, True):
        finder = MaxBatchSize(max_size=2, min_size=2)
        found = fit([finder], 4, own)
        assert (finder.found.size, finder.found.accumulation) == (2, 2)  # type: ignore[union-attr]
        assert_equal(found, fit([], 2, own, accumulate_grad_batches=2))


def test_the_gradient_is_that_of_the_batch_that_was_asked_for() -> None:
    gradients: list[torch.Tensor] = []

    class Keep(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))

    for callbacks in ([], [MaxBatchSize(max_size=2)]):
        trainer([*callbacks, Keep()], max_steps=1).fit(Toy().double(), _double(data()))
    # those of the trials come first in the second run; the last is the real one
    torch.testing.assert_close(gradients[0], gradients[-1], rtol=1e-12, atol=1e-15)


class Tokens(L.LightningModule):
    """Loss that is the mean over the tokens of a batch, whose number differs from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, keep = batch
        return ((self.net(x) - x).square().mean(-1) * keep).sum() / keep.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_found_accumulation_over_ragged_tokens_is_the_one_big_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 12, 8, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([12, 1, 5, 2, 9, 12, 1, 3])
    rows = torch.utils.data.TensorDataset(x, torch.arange(12) < lengths[:, None])

    def gradient(*callbacks: Any) -> torch.Tensor:
        found: list[torch.Tensor] = []

        class Keep(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                found.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))

        torch.manual_seed(0)
        run = trainer([*callbacks, Keep()], max_steps=1, limit_val_batches=0)
        run.fit(Tokens(), DataLoader(rows, 8))
        assert run.global_step == 1
        return found[-1]  # those of the trials come first

    whole = gradient()
    finder = MaxBatchSize(max_size=2)
    split = gradient(finder, TokenWeightedAccumulation(count="1"))
    assert (finder.found.size, finder.found.accumulation) == (2, 4)  # type: ignore[union-attr]
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9)
    assert (gradient(MaxBatchSize(max_size=2)) - whole).abs().max() > 1e-2  # a mean of means is another gradient


def _double(loader: DataLoader) -> DataLoader:
    loader.dataset.tensors = tuple(tensor.double() for tensor in loader.dataset.tensors)
    return loader


def test_a_failed_trial_leaves_nothing_allocated() -> None:
    live: list[int] = []

    class Measure(Callback):
        def _count(self) -> None:
            gc.collect()
            seen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors()}
            live.append(sum(seen.values()))

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            gc.freeze()  # what exists is neither counted nor looked through
            self._count()
            trials = Trials(trainer)
            gc.collect()
            meter = AllocationMeter(trials.record.tensors, 2**20)
            with pytest.raises(OutOfMemoryError), trials.trial(), meter:
                trials.train(lambda: torch.zeros(64, 512))
            assert meter.peak > 2**20
            del trials, meter
            self._count()
            gc.unfreeze()

    trainer([Measure()], max_steps=1).fit(TextModule(), DataLoader(Texts(), 4, collate_fn=pad))
    assert live[0] == live[1]


def _tensors() -> list[torch.Tensor]:
    return [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]


def test_small_datasets_bound_the_size(caplog: pytest.LogCaptureFixture) -> None:
    finder = MaxBatchSize(keep_effective_batch=False)
    run = trainer([finder])
    run.fit(Toy(), data(6, 4), data())
    assert finder.found.size == 6  # type: ignore[union-attr]
    assert run.global_step == 1
    finder = MaxBatchSize()
    with caplog.at_level("INFO"):
        trainer([finder]).fit(Toy(), data(6, 64), data())
    assert "the batch size is 64, but a process has only 6 samples" in caplog.text
    assert (finder.found.size, finder.found.accumulation) == (64, 1)  # type: ignore[union-attr]


def test_a_resumed_run_takes_the_size_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    first = trainer([MaxBatchSize(max_size=2)])
    first.fit(Toy(), datamodule=(source := _Rows()))
    assert source.batch_size == 4  # given back
    first.save_checkpoint(path, weights_only=False)
    trials.clear()
    spy, finder = Spy(), MaxBatchSize(max_size=1)
    spy.on_train_start = lambda *_: None  # type: ignore[method-assign]
    spy.on_train_epoch_start = lambda *_: None  # type: ignore[method-assign]
    trainer([spy, finder], max_epochs=2).fit(Toy(), datamodule=_Rows(), ckpt_path=path)
    assert trials == [2] * 8
    assert finder.found.size == 2  # type: ignore[union-attr]


class _Rows(L.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return data(16, self.batch_size)


class _Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield torch.ones(WIDTH)


def test_what_cannot_work_is_refused() -> None:
    for arguments, message in (
        ({"mode": "fast"}, "mode must be one of power, binary, got 'fast'"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1, got 1.0"),
        ({"memory_limit": "much"}, "memory_limit must be a number of bytes .* got 'much'"),
        ({"min_size": 0}, "min_size must be a whole number of at least 1, got 0"),
        ({"scan": 0}, "scan must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            MaxBatchSize(**arguments)
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        trainer([MaxBatchSize()]).fit(Toy(optimizers=2), data())
    with pytest.raises(ConfigurationError, match="iterable dataset _Endless"):
        trainer([MaxBatchSize()]).fit(Toy(), DataLoader(_Endless(), 1))
    with pytest.raises(ConfigurationError, match="no attribute 'batch'"):
        trainer([MaxBatchSize("batch")]).fit(Toy(), datamodule=_Rows())
    fixed = _Rows()
    fixed.train_dataloader = lambda: data(16, 8)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="but the training loader has the batch size"):
        trainer([MaxBatchSize()]).fit(Toy(), datamodule=fixed)
    with pytest.raises(ConflictError, match="GradientAccumulationScheduler"):
        trainer([MaxBatchSize(), L.callbacks.GradientAccumulationScheduler({0: 1})]).fit(Toy(), data())


def test_manual_optimization_searches_without_accumulation() -> None:
    finder = MaxBatchSize(keep_effective_batch=False, max_size=8)
    run = trainer([finder])
    run.fit(Toy(optimizers=2), data())
    assert finder.found.size == 8  # type: ignore[union-attr]
    assert run.global_step == 4  # two batches, two optimizers


@pytest.mark.turns(6, family="ranks")
def test_processes_agree_on_the_smallest(tmp_path: Path) -> None:
    run_ranks(_agree_on_the_smallest, tmp_path)


def _agree_on_the_smallest() -> None:
    torch.manual_seed(0)
    finder = MaxBatchSize(margin=0, memory_limit=["4MiB", "1500KiB"][int(os.environ["RANK"])])
    run = trainer([finder], devices=2, strategy="ddp")
    run.fit(module := TextModule(), datamodule=Texting())
    found = finder.found
    assert found is not None
    first, second = everyones([found.size, found.accumulation, found.trials[-1]["failed_in"], weights(module)])
    assert_equal(first, second)
    assert run.global_step == 1
    assert found.size * found.accumulation == 16
    assert 1 < found.size < 16
    assert found.trials[-1]["failed_in"] == "training"


def test_settings_that_count_batches_go_on_counting_the_same_samples() -> None:
    class Count(Callback):
        seen = 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx >= 0 and trainer.fit_loop.epoch_loop.batch_progress.current.ready > self.seen:
                self.rows = getattr(self, "rows", 0) + len(batch[0])
                self.seen += 1

    counter = Count()
    run = trainer([MaxBatchSize(max_size=2, idle=("Count",)), counter], limit_train_batches=3, val_check_interval=2)
    run.fit(Toy(), data(rows=32), data())
    assert counter.rows == 3 * 4
    assert (run.limit_train_batches, run.val_check_interval) == (3, 2)
    assert run.global_step == 3


class _Keyed(L.LightningDataModule):
    """Batches of keys in two shapes, of which the second is rarer and larger."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        keyed = KeyedBatchSampler(range(32), self.batch_size, lambda index: index % 4 == 0)
        return keyed_loader(_Shapes(), keyed, torch.stack)


class _Shapes(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        return torch.full((64 if key[0] % 4 == 0 else 16,), 0.1)


@pytest.mark.parametrize("passed", [False, True])
def test_loaders_of_whole_batches_grow(passed: bool) -> None:
    sizes: set[tuple[int, ...]] = set()  # not the callback's: what that holds is put back after the trials

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            sizes.add(tuple(batch.shape))

    def fit(callbacks: list[Any], size: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        datamodule = _Keyed(size)
        given = {"train_dataloaders": datamodule.train_dataloader()} if passed else {"datamodule": datamodule}
        trainer(callbacks).fit(module := TextModule(), **given)
        return weights(module)

    finder = MaxBatchSize(keep_effective_batch=False, max_size=8)
    found = fit([finder, Watch()], 4)
    assert finder.found is not None
    assert [trial["size"] for trial in finder.found.trials] == [1, 2, 4, 8]
    assert sizes == {(8, 16), *((size, 64) for size in (1, 2, 4, 8))}  # trials took the larger shape
    assert_equal(found, fit([], 8))


def test_a_fit_may_end_before_its_first_validation() -> None:
    run = trainer([MaxBatchSize(max_size=2)], num_sanity_val_steps=2, max_steps=1)
    run.fit(Toy(), data(), data())
    assert run.global_step == 1


def test_a_schedule_of_known_length_does_not_run_out() -> None:
    class Cycle(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    loader = DataLoader(data(15).dataset, 8, drop_last=True)  # one batch of 8, but seven of 2
    run = trainer([finder := MaxBatchSize(max_size=2)], max_epochs=2)
    run.fit(Cycle(), loader)
    assert finder.found is not None
    assert finder.found.size == 2
    assert run.global_step == 2
    assert run.limit_train_batches == 1.0


def test_a_network_that_does_not_run_with_one_sample_starts_above() -> None:
    class Normed(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.norm(self.net(batch[0])).square().mean()

    module = Normed()
    module.norm = nn.BatchNorm1d(WIDTH)
    trainer([finder := MaxBatchSize(max_size=4)]).fit(module, data())
    assert finder.found is not None
    assert [trial["size"] for trial in finder.found.trials] == [2, 4]
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        trainer([MaxBatchSize(max_size=1)]).fit(module, data())

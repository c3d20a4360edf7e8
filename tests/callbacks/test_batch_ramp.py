"""BatchRamp: every row once and in order, windows of the right size, Seesaw's samples, resume in every stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import BatchRamp, ConfigurationError, ConflictError, ExactResume, seesaw_milestones
from lit_efficient.mechanisms.order.piecewise_loader import PiecewiseLoader, pieces_in, pieces_of
from lit_efficient.testing import Run
from tests.contract.effects import windows_of
from tests.contract.row import Row
from tests.support import WIDTH, Toy, assert_equal, data, trainer, weights


def grows(run: Run) -> None:
    """Steps of one micro-batch come first, and the others have as many as the trainer accumulates."""
    sizes = [len(window) for window in windows_of(run)]
    assert sizes[0] == 1
    assert set(sizes[2:]) <= {2}, sizes
    assert run.checkpoint["callbacks"]["BatchRamp"] == {"accumulation": 2}
    assert run.trainer.accumulate_grad_batches == 2


ROW = Row(lambda: BatchRamp([1]), grows, trainer={"accumulate_grad_batches": 2})


class Seen(L.Callback):
    """Rows of each batch, and of each optimizer step."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.steps: list[int] = []
        self.validated: list[int] = []
        self._open = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0][:, 0].tolist())
        self._open += len(batch[0])
        if trainer.global_step > len(self.steps):
            self.steps.append(self._open)
            self._open = 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(len(self.batches))


class Save(L.Callback):
    """Saves after a batch."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch -= 1
        if self.batch == 0:
            trainer.save_checkpoint(self.path)


def numbered(rows: int = 32, batch_size: int = 8, shuffle: bool = False) -> DataLoader[Any]:
    numbers = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, WIDTH) / rows
    return DataLoader(TensorDataset(numbers.clone()), batch_size, shuffle=shuffle)


def fit(ramp: BatchRamp | None, *more: Any, ckpt_path: Path | None = None, loader: Any = None, **arguments: Any) -> Any:
    seen, module = Seen(), Toy()
    run = trainer([*([ramp] if ramp else []), *more, seen], **arguments)
    run.fit(module, numbered() if loader is None else loader, data(), ckpt_path=ckpt_path)
    return run, module, seen


def test_a_step_has_the_rows_of_its_stage_and_each_row_comes_once_in_order() -> None:
    # full: 8 rows x 2; 1/8, 1/4, 1/2 of it and all are 2, 4, 8 and 16 rows a step
    run, _, seen = fit(BatchRamp([4, 6, 8]), accumulate_grad_batches=2, max_epochs=3)
    assert seen.steps[:8] == [2] * 4 + [4] * 2 + [8] * 2
    assert sum(seen.steps) == 96
    assert set(seen.steps[8:]) <= {16, 8}  # an epoch may end within a window, as ever
    rows = [round(32 * row) for batch in seen.batches for row in batch]
    assert rows == [*range(32)] * 3
    assert run.global_step == len(seen.steps)
    assert run.accumulate_grad_batches == 2  # given back
    assert len(seen.validated) == 3  # at each epoch's end, however many batches it has
    assert seen.validated[-1] == len(seen.batches)


@pytest.mark.parametrize("batch", range(1, 16))
def test_it_resumes_exactly_after_every_batch(batch: int, tmp_path: Path) -> None:
    def run(save: Save | None, path: Path | None = None) -> Any:
        loader = numbered(36, shuffle=True)  # with a last batch of 4
        arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 13}
        more = [ExactResume(1), *([save] if save else [])]
        return fit(BatchRamp([2, 5, 8]), *more, ckpt_path=path, loader=loader, **arguments)

    whole, expected, seen = run(Save(batch, tmp_path / "half.ckpt"))
    resumed, module, rest = run(None, tmp_path / "half.ckpt")
    assert 0 < len(rest.batches) < len(seen.batches)
    assert resumed.global_step == whole.global_step == 13
    assert_equal(weights(expected), weights(module))
    assert rest.batches == seen.batches[len(seen.batches) - len(rest.batches) :]
    assert_equal(whole.optimizers[0].state_dict(), resumed.optimizers[0].state_dict())


def test_micro_batches_give_the_gradient_of_the_smaller_batch() -> None:
    _, ramped, _ = fit(BatchRamp([100]), accumulate_grad_batches=2, max_epochs=1)
    _, plain, _ = fit(None, accumulate_grad_batches=1, max_epochs=1)
    assert_equal(weights(plain), weights(ramped), "half of two micro-batches is not one")
    _, ramped, _ = fit(BatchRamp([100]), max_epochs=1)
    _, plain, _ = fit(None, loader=numbered(batch_size=4), max_epochs=1)
    assert_equal(weights(plain), weights(ramped), "half of a batch is not a batch of half the rows")


def test_shares_are_of_max_steps() -> None:
    _, _, seen = fit(BatchRamp([0.5]), max_steps=4, max_epochs=-1)
    assert seen.steps == [4, 4, 8, 8]


def test_a_short_batch_has_fewer_pieces() -> None:
    pieces = pieces_of({"x": torch.arange(3), "names": ["a", "b", "c"], "rate": torch.tensor(1.0)}, 4)
    assert [None if piece is None else (piece["x"].tolist(), piece["names"]) for piece in pieces] == [
        ([0], ["a"]),
        ([1], ["b"]),
        ([2], ["c"]),
        None,
    ]


def test_the_length_is_what_comes() -> None:
    for given in range(12):
        for batches in range(6):
            loader = PiecewiseLoader([torch.zeros(8)] * batches, [(5, 4), (9, 2)])
            loader.given = given
            loader.begin_epoch()
            expected = len(loader)
            assert expected == len(list(loader)) == pieces_in(batches, given, loader.stages)


def test_seesaw_trains_on_the_samples_of_the_cosine_run() -> None:
    for doublings in (1, 2, 5):
        milestones = seesaw_milestones(100_000, doublings)
        last = (1 - math.acos(2 ** (1 - doublings) - 1) / math.pi) * 100_000 / 2**doublings
        steps = [0, *milestones, milestones[-1] + round(last)]
        samples = [(b - a) * 2**k for k, (a, b) in enumerate(pairwise(steps))]
        assert abs(sum(samples) - 100_000) < 2 ** (doublings + 1)
        for k in range(1, doublings + 1):  # the cosine has halved k times where the k-th milestone is
            cosine = 0.5 * (1 + math.cos(math.pi * sum(samples[:k]) / 100_000))
            assert abs(cosine - 2.0**-k) < 1e-3
    with pytest.raises(ConfigurationError, match="seesaw_milestones: doublings"):
        seesaw_milestones(10, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"milestones": []}, "milestones must be steps from 1 on or fractions between 0 and 1, in ascending order"),
        ({"milestones": [2, 1]}, "in ascending order"),
        ({"milestones": [0]}, "milestones must be"),
        ({"milestones": [0.5, 2]}, "milestones must be"),
        ({"milestones": [1], "factor": 1}, "factor must be a whole number of at least 2, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        BatchRamp(**arguments)


@pytest.mark.parametrize(
    ("milestones", "arguments", "words"),
    [
        ([0.5], {}, r"milestones=0.5 is a fraction of Trainer\(max_steps=...\), which is not set"),
        ([1, 2], {"accumulate_grad_batches": 6}, "accumulate_grad_batches=6 is neither a multiple nor"),
        ([1], {"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
        ([1], {"val_check_interval": 0.5}, "val_check_interval=0.5"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    milestones: list[float], arguments: dict[str, Any], words: str
) -> None:
    module = Toy("configure_model")
    with pytest.raises(ConfigurationError, match=words):
        trainer([BatchRamp(milestones)], **arguments).fit(module, data(), data())
    assert module.net is None


class Endless:
    def __iter__(self) -> Iterator[Any]:
        return iter(numbered())


def test_manual_optimization_several_loaders_and_those_without_length_are_refused() -> None:
    with pytest.raises(ConflictError, match="Toy uses manual optimization"):
        trainer([BatchRamp([1])]).fit(Toy(optimizers=2), data(), data())
    with pytest.raises(ConfigurationError, match="several loaders cannot be split: raise accumulate_grad_batches"):
        fit(BatchRamp([1]), loader=[numbered(), numbered()])
    with pytest.raises(ConfigurationError, match="a Endless has no length, so its batches cannot be split"):
        fit(BatchRamp([1]), loader=Endless())

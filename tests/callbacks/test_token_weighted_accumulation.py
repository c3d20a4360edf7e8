"""TokenWeightedAccumulation: ragged micro-batches, windows and ranks equal one big batch; stock Lightning does not."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_efficient import (
    ChunkedCrossEntropy,
    ConfigurationError,
    ConflictError,
    ExactResume,
    TokenWeightedAccumulation,
)
from lit_efficient.callbacks import token_weighted_accumulation
from lit_efficient.callbacks.token_weighted_accumulation import count_tokens
from tests.processes import run_ranks
from tests.ranks.toys import sharding
from tests.support import Toy, data, trainer

V = 11


class Ragged(L.LightningModule):
    """A user's module: the mean over a micro-batch's tokens, in float64, one SGD step a window."""

    def __init__(self, style: str = "mean", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.style = style
        self.gradients: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(V, V, generator=generator).to(dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch["input_ids"], batch["labels"]
        losses = F.cross_entropy(self.table[ids].flatten(0, 1), labels.flatten(), reduction="none")
        if self.style == "skip" and batch_idx == 1:
            return None
        if self.style == "clamped":
            return losses.sum() / (labels != -100).sum().clamp(min=1)
        return losses.sum() / (labels != -100).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.table.grad.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(counts: list[int], length: int = 12) -> list[dict[str, torch.Tensor]]:
    """One micro-batch for each count, of two sequences with so many labels in all."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for count in counts:
        ids = torch.randint(0, V, (2, length), generator=generator)
        labels = torch.randint(0, V, (2, length), generator=generator).flatten()
        labels[torch.randperm(2 * length, generator=generator)[count:]] = -100
        made.append({"input_ids": ids, "labels": labels.view(2, length)})
    return made


def gradients(counts: list[int], callbacks: list[Any], module: Any = None, **arguments: Any) -> list[torch.Tensor]:
    module = module or Ragged()
    trainer(callbacks, limit_val_batches=0, **arguments).fit(module, _Listed(batches(counts)))
    return module.gradients


class _Listed:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def exact(counts: list[int], window: int, module: Any = None) -> list[torch.Tensor]:
    """One big batch a window."""
    result = []
    module = module or Ragged()
    made = batches(counts)
    for start in range(0, len(made), window):
        big = {key: torch.cat([batch[key] for batch in made[start : start + window]]) for key in made[0]}
        (gradient,) = torch.autograd.grad(module.training_step(big, 0), module.table)
        result.append(gradient)
    return result


COUNTS = [24, 1, 7, 3, 20, 2, 11, 5]  # with windows of 3 the last one is short


@pytest.mark.parametrize("window", [1, 3, 8, 16])
def test_every_window_equals_one_big_batch_and_stock_lightning_does_not(window: int) -> None:
    ours = gradients(COUNTS, [TokenWeightedAccumulation()], accumulate_grad_batches=window)
    stock = gradients(COUNTS, [], accumulate_grad_batches=window)
    expected = exact(COUNTS, window)
    assert len(ours) == len(expected) == math.ceil(len(COUNTS) / window)
    for one, other, big in zip(ours, stock, expected):
        torch.testing.assert_close(one, big, rtol=1e-12, atol=1e-14)
        if window > 1:
            assert (other - big).norm() > 0.1 * big.norm()


def test_a_short_last_window_is_wrong_in_stock_lightning_even_for_equal_counts() -> None:
    counts = [6] * 4
    ours = gradients(counts, [TokenWeightedAccumulation()], accumulate_grad_batches=3)
    stock = gradients(counts, [], accumulate_grad_batches=3)
    expected = exact(counts, 3)
    assert torch.equal(ours[0], stock[0])
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(stock[1], expected[1] / 3, rtol=1e-12, atol=1e-14)


def test_equal_counts_are_lightnings_own_bits() -> None:
    module, plain = Ragged(dtype=torch.float32), Ragged(dtype=torch.float32)
    ours = gradients([7] * 6, [TokenWeightedAccumulation()], module, accumulate_grad_batches=3)
    stock = gradients([7] * 6, [], plain, accumulate_grad_batches=3)
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def test_float32_is_exact_to_1e_6() -> None:
    module = Ragged(dtype=torch.float32)
    ours = gradients(COUNTS, [TokenWeightedAccumulation()], module, accumulate_grad_batches=8)
    (big,) = exact(COUNTS, 8)
    assert (ours[0] - big).norm() <= 1e-6 * big.norm()


@pytest.mark.parametrize("style", ["mean", "clamped"])  # 0/0 for a batch without tokens, or 0/1
@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 5, 9], [9, 5, 0]])
def test_micro_batches_without_tokens_count_for_nothing(style: str, counts: list[int]) -> None:
    ours = gradients(counts, [TokenWeightedAccumulation()], Ragged(style), accumulate_grad_batches=3)
    torch.testing.assert_close(ours[0], exact(counts, 3)[0], rtol=1e-12, atol=1e-14)


class _Cut(Ragged):
    """Labels past the eighth go while the batch is moved."""

    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        return {"input_ids": batch["input_ids"], "labels": batch["labels"].index_fill(1, torch.arange(8, 12), -100)}


def test_tokens_are_counted_behind_a_transfer_that_changes_them() -> None:
    module = Ragged()
    cut = [_Cut().transfer_batch_to_device(batch) for batch in batches([24, 9])]
    big = {key: torch.cat([batch[key] for batch in cut]) for key in cut[0]}
    (gradient,) = torch.autograd.grad(module.training_step(big, 0), module.table)
    ours = gradients([24, 9], [TokenWeightedAccumulation()], _Cut(), accumulate_grad_batches=2)
    torch.testing.assert_close(ours[0], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_is_none_is_passed_over_as_lightning_does() -> None:
    module, made = Ragged(), batches([5, 8])
    trainer([TokenWeightedAccumulation()], limit_val_batches=0).fit(module, _Listed([made[0], None, made[1]]))
    assert len(module.gradients) == 2


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.")
def test_a_step_that_returns_none_is_left_out_of_the_tokens() -> None:
    ours = gradients([5, 8, 9], [TokenWeightedAccumulation()], Ragged("skip"), accumulate_grad_batches=3)
    made = batches([5, 8, 9])
    big = {key: torch.cat([made[0][key], made[2][key]]) for key in made[0]}
    module = Ragged()
    (gradient,) = torch.autograd.grad(module.training_step(big, 0), module.table)
    torch.testing.assert_close(ours[0], gradient, rtol=1e-12, atol=1e-14)


def test_clipping_sees_the_combined_gradient() -> None:
    module = Ragged()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    before = module.table.detach().clone()
    (big,) = exact(COUNTS, 8)
    clip = float(big.norm()) / 2
    gradients(COUNTS, [TokenWeightedAccumulation()], module, accumulate_grad_batches=8, gradient_clip_val=clip)
    torch.testing.assert_close(before - module.table, big / 2, rtol=1e-4, atol=1e-12)  # clipping adds 1e-6 to the norm


def test_counts_by_path_mask_and_method() -> None:
    batch = batches([9])[0]
    module = Ragged()
    mask = batch["labels"] != -100

    def count(given: Any, owner: Any = module, **arguments: Any) -> int:
        return TokenWeightedAccumulation(**arguments)._count(owner, given)

    assert count(batch) == count(batch, count="labels") == 9
    assert count({"a": [batch]}, count="a.0.labels") == 9
    assert count((0, mask), count="1") == count({"mask": mask.long()}, count="mask", mask=True) == 9
    assert count(batch, shift=True) == count_tokens(batch["labels"][:, 1:]) < 9
    assert count(batch, ignore_index=3) == int((batch["labels"] != 3).sum())
    module.num_tokens = lambda given: torch.tensor(5)
    module.other = lambda given: 6
    assert (count(batch), count(batch, count="self.other"), count(batch, count="labels")) == (5, 6, 9)


def test_labels_of_a_transformers_model_are_counted_as_it_shifts_them() -> None:
    from tests.callbacks.test_chunked_cross_entropy import Tuner
    from tests.callbacks.test_chunked_cross_entropy import batch as make

    module = Tuner()
    module.configure_model()
    given = make()
    expected = int((given["labels"][:, 1:] != -100).sum())
    assert expected != int((given["labels"] != -100).sum())
    assert TokenWeightedAccumulation()._count(module, given) == expected
    ChunkedCrossEntropy().transform(module)
    assert TokenWeightedAccumulation()._count(module, given) == expected


@pytest.mark.parametrize(
    ("arguments", "batch", "message"),
    [
        ({}, {"input_ids": torch.ones(1)}, "count=auto finds no 'labels' in a batch with input_ids"),
        ({}, (torch.ones(1),), "finds no 'labels' in a batch of 1 parts"),
        ({"count": "a.b"}, {"a": {"c": 1}}, "there is no 'b' in a batch with c"),
        ({"count": "0"}, [torch.ones(2)], "got a torch.float32 tensor"),
        ({"count": "0"}, ["text"], "got a str"),
    ],
)
def test_refuses_batches_it_cannot_count(arguments: dict[str, Any], batch: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TokenWeightedAccumulation(**arguments)._count(Ragged(), batch)


def test_refuses_what_cannot_be_right() -> None:
    with pytest.raises(ConfigurationError, match=r"count must be auto, .* got 'a\.\.b'"):
        TokenWeightedAccumulation(count="a..b")
    with pytest.raises(ConfigurationError, match="has no such method"):
        trainer([TokenWeightedAccumulation("self.nothing")]).fit(Toy("init"), data(), data())
    with pytest.raises(ConflictError, match="optimizes manually"):
        trainer([TokenWeightedAccumulation()]).fit(Toy("init", optimizers=2), data(), data())
    module = Toy("init")
    next(module.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConflictError, match="post-accumulate hook"):
        trainer([TokenWeightedAccumulation()]).fit(module, data(), data())


@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_a_window_that_a_checkpoint_interrupts_goes_on(saved_after: int, tmp_path: Path) -> None:
    """Between the micro-batches of a window its tokens and gradients so far are kept: not a bit differs."""

    class SaveBetween(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == saved_after:
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    def run(callbacks: list[Any], **resumed: Any) -> Ragged:
        module = Ragged()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)  # type: ignore[method-assign]
        loader = torch.utils.data.DataLoader(batches(COUNTS[:6]), batch_size=None)  # type: ignore[arg-type]
        made = trainer([TokenWeightedAccumulation(), ExactResume(), *callbacks], accumulate_grad_batches=3)
        made.fit(module, loader, **resumed)
        return module

    whole = run([SaveBetween()])
    resumed = run([], ckpt_path=tmp_path / "between.ckpt")
    assert torch.equal(whole.table, resumed.table)
    assert len(resumed.gradients) == (1 if saved_after == 4 else 2)
    assert torch.equal(whole.gradients[-1], resumed.gradients[-1])


@pytest.mark.turns(6, family="ranks")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_with_unequal_counts_equal_one_big_batch(strategy: str, tmp_path: Path) -> None:
    run_ranks(_equal_one_big_batch, tmp_path, strategy)


class _Table(nn.Module):
    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table)


class _ShardedRagged(Ragged):
    def configure_model(self) -> None:
        if "net" not in self._modules:
            net = _Table(self.table)
            del self.table
            self.net = fully_shard(net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.net.table.grad.detach().full_tensor())


def _equal_one_big_batch(strategy: str) -> None:
    sharded = strategy == "fsdp2"
    counts = COUNTS[:6] if sharded else [*COUNTS[:4], 0, 9, 3, 8]
    mine = [batch for i, batch in enumerate(batches(counts)) if i % 2 == int(os.environ["RANK"])]
    plan: Any = sharding() if sharded else "ddp"

    def fit(callbacks: list[Any]) -> list[torch.Tensor]:
        module = (_ShardedRagged if sharded else Ragged)("clamped")
        settings = {"accumulate_grad_batches": 2, "limit_val_batches": 0, "use_distributed_sampler": False}
        trainer(callbacks, devices=2, strategy=plan, **settings).fit(module, _Listed(mine))
        return module.gradients

    summed = token_weighted_accumulation._sum_over_ranks
    with mock.patch.object(token_weighted_accumulation, "_sum_over_ranks", side_effect=summed) as sums:
        ours = fit([TokenWeightedAccumulation()])
    assert sums.call_count == 2 + 1, "one a step, and one to begin with"
    expected = exact(counts, 4)  # 2 ranks x 2 micro-batches, the last window with what is left
    assert len(ours) == len(expected) == 2
    for one, big in zip(ours, expected):
        torch.testing.assert_close(one, big, rtol=1e-12, atol=1e-14)
    if not sharded:
        assert (fit([])[0] - expected[0]).norm() > 0.1 * expected[0].norm()


@pytest.mark.gpu
def test_with_a_gradient_scaler() -> None:
    module = Ragged("clamped", torch.float32)
    ours = gradients(
        COUNTS,
        [TokenWeightedAccumulation()],
        module,
        accumulate_grad_batches=8,
        accelerator="gpu",
        precision="16-mixed",
    )
    (big,) = exact(COUNTS, 8)
    assert (ours[0].cpu() - big).norm() <= 1e-5 * big.norm()

"""GradientNoiseScale: the known answer of a quadratic, and a slow reference's numbers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_efficient import (
    ConfigurationError,
    ConflictError,
    ExactResume,
    GPTConfig,
    GradientNoiseScale,
    LanguageModeling,
    TokenWeightedAccumulation,
    scaled_rate,
)
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.processes import run_ranks
from tests.support import Toy, data, trainer

WIDTH, NOISE, DISTANCE = 64, 1.0, 0.5
KNOWN = WIDTH * NOISE**2 / (WIDTH * DISTANCE**2)  # tr(S) / |G|^2


def estimates_are_there(run: Run) -> None:
    noise = run.technique("GradientNoiseScale")
    sums = noise.state_dict()["sums"]
    assert sums is not None
    assert sums.isfinite().all()
    assert noise._samples > 0


def make() -> GradientNoiseScale:
    return GradientNoiseScale(every_n_steps=1)


ROW = Row(make, estimates_are_there, changes=False, trainer={"accumulate_grad_batches": 2})


class Quadratic(pl.LightningModule):
    """The loss |w - x|^2 / 2: of each sample the gradient is w - x, so that its mean and covariance are known."""

    def __init__(self, samples: int = 2048, batch: int = 2, rate: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((WIDTH,), DISTANCE))
        self.x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0)) * NOISE
        self.batch, self.rate = batch, rate

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.5 * (self.w - batch).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], self.rate)

    def train_dataloader(self) -> Any:
        return DataLoader(self.x, self.batch)


def fit(noise: Any, module: Any, **arguments: Any) -> Any:
    run = trainer([noise], **{"accumulate_grad_batches": 4, **arguments})
    run.fit(module)
    return run


def test_the_noise_scale_of_a_quadratic_is_the_known_one(caplog: pytest.LogCaptureFixture) -> None:
    noise = GradientNoiseScale(every_n_steps=1, decay=0.999)
    with caplog.at_level(logging.INFO):
        fit(noise, Quadratic(batch=4, rate=1e-30))
    assert noise.noise_scale() == pytest.approx(KNOWN, rel=0.08)
    tr, signal, weight = noise.state_dict()["sums"].tolist()
    assert tr / weight == pytest.approx(WIDTH * NOISE**2, rel=0.08)
    assert signal / weight == pytest.approx(WIDTH * DISTANCE**2, rel=0.08)
    (line,) = [record.message for record in caplog.records if record.message.startswith("GradientNoiseScale:")]
    assert (
        "with 16 per step: smaller batches would save samples. With 4 per step, replace the rate 1e-30 by 2.5e-31"
        in line
    )
    assert "5e-31 (square-root rule, Adam)" in line


def test_equals_a_slow_reference_with_unequal_batches_and_a_short_last_window() -> None:
    """27 samples in micro-batches of 2, the last of 1, in windows of 4, the last of 2; the rate is not zero."""
    module = Quadratic(27, rate=0.1)
    noise = GradientNoiseScale(every_n_steps=1, decay=0.5)
    fit(noise, module, precision=64)
    w = torch.full((WIDTH,), DISTANCE, dtype=torch.float64)
    sums = torch.zeros(3, dtype=torch.float64)
    micro = module.x.double().split(2)
    for start in range(0, len(micro), 4):
        window = micro[start : start + 4]
        gradients = [w - rows.mean(0) for rows in window]
        mean = sum(gradients) / len(window)
        small = sum(g.square().sum() for g in gradients) / len(window)
        big, inverse = mean.square().sum(), sum(1 / len(rows) for rows in window) / len(window)
        n = len(window)
        tr, signal = (small - big) / (inverse * (1 - 1 / n)), (n * big - small) / (n - 1)
        sums = 0.5 * sums + torch.stack([tr, signal, torch.ones_like(tr)])
        w = w - 0.1 * sum(gradients) / 4  # Lightning divides by four whatever the window
    torch.testing.assert_close(noise.state_dict()["sums"].double(), sums, rtol=1e-5, atol=0)
    torch.testing.assert_close(module.w.detach(), w)


class Tokens(Quadratic):
    """Rows of up to three tokens: the mean over all tokens of a micro-batch. Labels count them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        losses = 0.5 * (self.w - x).square().sum(1)
        counts = (labels != -100).sum(1)
        return {"loss": (losses * counts).sum() / counts.sum()}

    def train_dataloader(self) -> Any:
        labels = torch.arange(len(self.x))[:, None] + 5 * torch.arange(3) % 7
        return DataLoader(TensorDataset(self.x, torch.where(labels % 3 > 0, labels, -100)), self.batch)


def test_micro_batches_that_are_weighed_by_their_tokens_give_the_reference_s_numbers() -> None:
    module, noise = Tokens(32, batch=1, rate=0.1), GradientNoiseScale(every_n_steps=1, decay=0.5)
    counts = TokenWeightedAccumulation(count="1")
    trainer([noise, counts], accumulate_grad_batches=4, precision=64).fit(module)
    w = torch.full((WIDTH,), DISTANCE, dtype=torch.float64)
    sums = torch.zeros(3, dtype=torch.float64)
    loader = module.train_dataloader()
    for start in range(0, 32, 4):
        rows = module.x[start : start + 4].double()
        weights = (loader.dataset.tensors[1][start : start + 4] != -100).sum(1).double()
        gradients = w - rows  # one sample a micro-batch
        shares = weights / weights.sum()
        mean = (shares[:, None] * gradients).sum(0)
        # E|g_i|^2 = |G|^2 + tr(S) and E|mean|^2 = |G|^2 + tr(S) sum(shares^2)
        small, big, joint = gradients.square().sum(1).mean(), mean.square().sum(), shares.square().sum()
        tr = (small - big) / (1 - joint)
        sums = 0.5 * sums + torch.stack([tr, small - tr, torch.ones_like(tr)])
        w = w - 0.1 * mean
    assert len({*(loader.dataset.tensors[1] != -100).sum(1).tolist()}) > 1
    torch.testing.assert_close(noise.state_dict()["sums"].double(), sums, rtol=1e-5, atol=0)
    torch.testing.assert_close(module.w.detach(), w)


class Shared(Tokens):
    """Each process has every n-th row, so that n processes have the same rows in a step as one."""

    def train_dataloader(self) -> Any:
        rows = super().train_dataloader().dataset
        place = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(rows, self.batch, sampler=DistributedSampler(rows, *place, shuffle=False))


@pytest.mark.turns(6, family="ranks")
def test_weighted_micro_batches_of_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    run_ranks(_equal, tmp_path, _weighted(4))


def _equal(alone: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = _weighted(2, devices=2, strategy="ddp")
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)


def _weighted(accumulate: int, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    module, noise = Shared(32, batch=1, rate=0.1), GradientNoiseScale(every_n_steps=1, decay=0.5)
    counts = TokenWeightedAccumulation(count="1")
    options = {"accumulate_grad_batches": accumulate, "use_distributed_sampler": False, **arguments}
    trainer([noise, counts], **options).fit(module)
    sums = noise.state_dict()["sums"]
    assert isinstance(sums, torch.Tensor)
    return sums, module.w.detach()


def test_the_advice_names_the_rate_of_the_run_and_not_the_schedule_s_end(caplog: pytest.LogCaptureFixture) -> None:
    """Every schedule that ends at 0 led to "instead of the rate 0 take 0"."""

    class Ends(Quadratic):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([self.w], 0.125)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with caplog.at_level(logging.INFO):
        run = fit(GradientNoiseScale(every_n_steps=3), Ends(64))
    assert run.optimizers[0].param_groups[0]["lr"] == 0
    assert "replace the rate 0.125 by" in caplog.text


def test_it_measures_language_models(caplog: pytest.LogCaptureFixture) -> None:
    """LanguageModeling adds TokenWeightedAccumulation under accumulation, which no option takes out."""
    model = LanguageModeling(GPTConfig(11, dim=16, depth=1, num_heads=2, max_length=8), warmup_steps=0)
    ids = torch.randint(11, (32, 8), generator=torch.Generator().manual_seed(0))
    rows = [
        {"input_ids": row, "labels": torch.where(torch.arange(8) < 3 + i % 5, row, -100)} for i, row in enumerate(ids)
    ]
    noise = make()
    with caplog.at_level(logging.INFO):
        trainer([noise], accumulate_grad_batches=4).fit(model, DataLoader(rows, 2), DataLoader(rows, 2))
    assert math.isfinite(noise.state_dict()["sums"].sum())
    assert "GradientNoiseScale:" in caplog.text
    assert model.trainer.callbacks != [noise]


def test_a_step_whose_squares_overflow_says_nothing() -> None:
    whole, rest = Quadratic(samples=64), Quadratic(samples=64)
    whole.x[0], rest.x = 1e30, rest.x[8:]  # a window less
    found = []
    for module in (whole, rest):
        fit(noise := GradientNoiseScale(every_n_steps=1), module)
        found.append(noise.state_dict()["sums"])
    assert found[0].isfinite().all()
    assert torch.equal(*found)
    assert math.isnan(GradientNoiseScale().noise_scale())


def test_it_looks_at_one_step_of_many_and_leaves_no_hooks() -> None:
    noise, module = GradientNoiseScale(every_n_steps=3, decay=0.5), Quadratic(64)
    fit(noise, module)  # 8 steps, of which it sees 0, 3 and 6
    assert noise.state_dict()["sums"][2] == 1 + 0.5 + 0.25
    assert not module.w._backward_hooks


def test_resumed_it_goes_on_with_its_averages() -> None:
    noise = make()
    assert noise.state_dict()["sums"] is None
    assert math.isnan(noise.noise_scale())
    noise.load_state_dict({"sums": torch.tensor([12.0, 3.0, 1.0]), "samples": 2, "rates": [0.1]})
    assert noise.noise_scale() == 4
    assert "larger batches still save steps. With 4 per step, replace the rate 0.1 by 0.2 (linear" in noise.advice(
        [0.1]
    )
    noise.load_state_dict({"sums": torch.tensor([12.0, -3.0, 1.0]), "samples": 2, "rates": [0.1]})
    assert noise.noise_scale() == math.inf
    assert "this gives no estimate yet" in noise.advice([0.1])


def test_resumed_within_a_window_it_knows_the_micro_batches_before(tmp_path: Path) -> None:
    """With the gradients that ExactResume keeps."""
    straight, half, again = (make() for _ in range(3))
    file = tmp_path / "half.ckpt"

    def save(run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:  # the third micro-batch of the second window
            run.save_checkpoint(file)

    arguments: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1}
    trainer([straight, ExactResume(0)], **arguments).fit(Quadratic(32))
    saves = LambdaCallback(on_train_batch_end=save)
    trainer([half, ExactResume(0), saves], **arguments).fit(Quadratic(32))
    trainer([again, ExactResume(0)], **arguments).fit(Quadratic(32), ckpt_path=str(file))
    assert torch.equal(again.state_dict()["sums"], straight.state_dict()["sums"])
    assert "window" not in again.state_dict()


def test_one_micro_batch_and_manual_optimization_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="each step has one: set accumulate_grad_batches to 2 or more"):
        fit(make(), Quadratic(), accumulate_grad_batches=1)
    with pytest.raises(ConflictError, match="GradientNoiseScale: Toy uses manual optimization"):
        trainer([make()]).fit(Toy(optimizers=2), data(), data())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GradientNoiseScale(0), "every_n_steps must be a whole number of at least 1, got 0"),
        (lambda: GradientNoiseScale(decay=1.0), "decay must be at least 0 and below 1, got 1.0"),
        (lambda: scaled_rate(0.1, 0, 2), "batch must be above 0, got 0"),
        (lambda: scaled_rate(0.1, 1, 2, "cubic"), "rule must be one of linear, sqrt, got 'cubic'"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()

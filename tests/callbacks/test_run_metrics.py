"""RunMetrics logs what a plain loop over the same batches computes, when the trainer logs, and changes nothing."""

import contextlib
import math

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lit_efficient import RunMetrics
from lit_efficient.data.text.collate import packed_batch
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.mechanisms.metering import count_real, peak_memory
from lit_efficient.mechanisms.run_figures import rates_of
from tests.processes import run_ranks
from tests.ranks import metering


class Kept(DummyLogger):
    """Keeps each row that it is given, by name: [(step, value)]."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.seen.setdefault(name, []).append((step, value))


class Model(L.LightningModule):
    """Two layers on rows of padded tokens; logs what it is asked to."""

    def __init__(self, groups=1, optimizers=1, logs=(), fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)])
        self.groups, self.count, self.logs, self.fused = groups, optimizers, logs, fused
        self.automatic_optimization = optimizers == 1
        self.norms = []

    def training_step(self, batch, batch_idx):
        x = batch["input_ids"].float()
        loss = sum(layer(x).square().mean() * 10 for layer in self.layers)
        self.log_dict(dict.fromkeys(self.logs, 7.0))
        for optimizer in self.optimizers() if not self.automatic_optimization else ():
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        if self.count > 1:
            return [torch.optim.SGD(layer.parameters(), 0.01 * (i + 1)) for i, layer in enumerate(self.layers)], []
        named = [{"params": layer.parameters(), "name": f"layer{i}"} for i, layer in enumerate(self.layers)]
        parameters = named if self.groups > 1 else self.parameters()
        optimizer = torch.optim.SGD(parameters, 0.01, fused=self.fused)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def rows():
    ids = torch.arange(48).view(8, 6) % 5
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    return [{"input_ids": ids[i], "attention_mask": mask[i]} for i in range(8)]


def fit(module, *callbacks, every=2, **arguments):
    logger = Kept()
    options = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "log_every_n_steps": every, "logger": logger, **arguments}
    L.Trainer(callbacks=[*callbacks, RunMetrics()], **options).fit(module, DataLoader(rows(), batch_size=2))
    return logger.seen


def reference(accumulate=1):
    """Norms of the whole gradient and rates of each step, by a loop of one's own."""
    module = Model()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    norms, rates = [], []
    for start in range(0, 4, accumulate):
        optimizer.zero_grad()
        for i in range(start, start + accumulate):
            x = torch.stack([row["input_ids"] for row in rows()[2 * i : 2 * i + 2]]).float()
            (sum(layer(x).square().mean() * 10 for layer in module.layers) / accumulate).backward()
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters())))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    return norms, rates


def test_norms_are_those_before_clipping_and_rates_those_of_the_step():
    norms, rates = reference()
    seen = fit(Model(), gradient_clip_val=0.5)
    assert seen["grad_norm"] == [(1, pytest.approx(norms[1], rel=1e-5)), (3, pytest.approx(norms[3], rel=1e-5))]
    assert seen["lr"] == [(1, rates[1]), (3, rates[3])]
    assert [step for step, _ in seen["peak_memory_gib"]] == [1, 3]
    assert 0.05 < seen["peak_memory_gib"][0][1] < 100
    assert all(0 <= share <= 1 for _, share in seen["data_wait"])
    norms, rates = reference(accumulate=2)
    seen = fit(Model(), every=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert seen["grad_norm"] == [(i, pytest.approx(norm, rel=1e-5)) for i, norm in enumerate(norms)]
    assert seen["lr"] == list(enumerate(rates))


def test_padding_is_not_counted_and_time_in_validation_neither(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("lit_efficient.mechanisms.run_figures.time.monotonic", lambda: float(next(clock)))
    seen = fit(Model(), every=4)
    # One reading when training starts, two a fetch (of which the fourth finds the end), one when it logs.
    (step, rate), (_, share) = seen["tokens_per_second"][0], seen["data_wait"][0]
    assert step == 3
    assert rate == pytest.approx(4 * 8 / 9)  # four batches of 2 x 4 real tokens in nine ticks
    assert share == pytest.approx(4 / 9)


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_unscaled_under_a_gradient_scaler(fused):
    class Scaled(MixedPrecision):
        def forward_context(self):
            return contextlib.nullcontext()

    plugin = Scaled("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    seen = fit(Model(fused=fused), plugins=[plugin])
    norms, _ = [[value for _, value in fit(Model(fused=fused))[name]] for name in ("grad_norm", "lr")]
    assert [value for _, value in seen["grad_norm"]] == pytest.approx(norms, rel=1e-5)


def test_each_group_and_each_optimizer_has_its_name():
    assert {"lr/layer0", "lr/layer1", "grad_norm"} <= fit(Model(groups=2)).keys()
    seen = fit(Model(optimizers=2))
    assert [value for _, value in seen["lr/1"]] == [0.02, 0.02]
    assert {"grad_norm/0", "grad_norm/1", "lr/0"} <= seen.keys()
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "name": name} for name in ("a", "b", "b", None)]
    assert list(rates_of([torch.optim.SGD(groups, 0.1)])) == ["lr/a", "lr/1", "lr/2", "lr/3"]


def test_what_others_log_stays_theirs():
    seen = fit(Model(logs=("grad_norm", "lr")), LearningRateMonitor())
    assert seen["grad_norm"] == [(1, 7.0), (3, 7.0)]
    assert seen["lr"] == [(1, 7.0), (3, 7.0)]
    assert "lr-SGD" in seen
    assert "lr" not in fit(Model(), LearningRateMonitor())


class OnBatchEnd(Model):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("lr", 7.0, prog_bar=True)  # arguments of its own, in the hook in which we log


def test_nothing_is_logged_nor_computed_without_a_logger(monkeypatch):
    monkeypatch.setattr("lit_efficient.mechanisms.run_figures.gradient_norm", None)
    monkeypatch.setattr("lit_efficient.mechanisms.run_figures.measure", None)
    assert fit(Model(), logger=False) == {}
    monkeypatch.undo()
    assert (1, 7.0) in fit(OnBatchEnd())["lr"]


def test_every_kind_of_gradient_counts_once():
    dense, half = torch.tensor([3.0, 0.0]), torch.full((1000,), 300.0, dtype=torch.float16)
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 3.0, 0.0], (4,), check_invariants=True)  # 4 at 0 when summed
    assert float(gradient_norm([dense, sparse])) == 5.0
    assert float(gradient_norm([half])) == pytest.approx(300 * math.sqrt(1000), rel=1e-3)  # no float16 holds its square
    assert gradient_norm([]) is None
    assert peak_memory(torch.device("meta")) is None


def test_a_mask_of_another_shape_is_no_padding():
    ids = torch.ones(2, 6, dtype=torch.long)
    assert count_real({"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)}) == (12, "tokens")
    assert count_real([torch.ones(7, 2)]) == (7, "samples")
    assert int(count_real({"input_ids": ids, "attention_mask": ids > 1})[0]) == 0


def test_what_fills_packed_rows_is_not_counted():
    documents = [(np.arange(1, n + 1), np.arange(1, n + 1)) for n in (3, 4, 5)]
    batch = packed_batch([documents[:2], documents[2:], documents[1:]], 9)
    count, unit = count_real(batch)
    assert (int(count), unit) == (3 + 4 + 5 + 4 + 5, "tokens")
    del batch["labels"]
    assert count_real(batch) == (27, "tokens")


def test_the_norm_of_two_processes_is_that_of_both_batches(tmp_path):
    run_ranks(metering.norms, tmp_path)
    alone = metering.alone()
    for name in ("ddp", "fsdp2"):
        assert float((tmp_path / name).read_text()) == pytest.approx(alone, rel=1e-5)


def test_a_table_has_them_in_the_rows_of_its_steps(tmp_path):
    fit(Model(logs=("loss",)), logger=CSVLogger(tmp_path, name="", version=""))
    header, *table = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "data_wait", "peak_memory_gib"} <= {*header.split(",")}
    assert {line.split(",")[header.split(",").index("step")] for line in table} == {"1", "3"}

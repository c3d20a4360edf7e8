"""Every scheduler, by step and by epoch, monitored or not, from every point of a short run at which people save."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lit_efficient.callbacks.exact_resume import ExactResume
from tests.callbacks.resume_kit import Augmented, equal, final_state, fit

BATCHES = 4


class Scheduled(pl.LightningModule):
    """Its metrics are means over batches, kept by Lightning and by an object of its own."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.mean = MeanMetric()
        self.make = make

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - torch.randn(())).pow(2).mean()
        self.mean(loss)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/highest", loss, on_step=False, on_epoch=True, reduce_fx=max)
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch + torch.randn(4)).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        return [optimizer], self.make(optimizer)

    def train_dataloader(self):
        return DataLoader(Augmented(3 * BATCHES), batch_size=3, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Augmented(4), batch_size=2)


class SaveEverywhere(pl.Callback):
    """Saves where checkpoints, timers and signals do."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0

    def save(self, trainer, where):
        if not trainer.sanity_checking:
            self.number += 1
            trainer.save_checkpoint(self.folder / f"{self.number:02d} {where}.ckpt")

    def on_train_batch_end(self, trainer, *args):
        self.save(trainer, "batch")

    def on_validation_batch_end(self, trainer, *args):
        self.save(trainer, "in validation")

    def on_validation_end(self, trainer, *args):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *args):
        self.save(trainer, "epoch")


class End(pl.Callback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_end(self, trainer, *args):
        self.seen.append(trainer.global_step)


def by_factors(optimizer):
    """Schedules that multiply the rate go together: each of them shows in the weights."""

    def plateau(**config):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.3)
        return {"scheduler": scheduler, "strict": False, **config}

    warmup, rest = lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.95)
    return [
        lr_scheduler.StepLR(optimizer, 2, 0.8),
        {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": "step", "frequency": 2},
        {"scheduler": lr_scheduler.SequentialLR(optimizer, [warmup, rest], milestones=[3]), "interval": "step"},
        plateau(monitor="val/loss"),
        plateau(monitor="val/loss", frequency=2),
        plateau(monitor="val/loss", interval="step"),
        plateau(monitor="train/loss_epoch"),
        plateau(monitor="train/highest"),
        plateau(monitor="train/mean"),
        plateau(monitor="train/loss", interval="step"),
        plateau(monitor="train/loss", interval="step", frequency=2),
    ]


def each_step(make):
    return lambda optimizer: [{"scheduler": make(optimizer), "interval": "step"}]


CASES = {
    "factors": (by_factors, {"val_check_interval": 2}),
    "factors, windows": (by_factors, {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "factors, by steps": (by_factors, {"max_steps": 7, "max_epochs": -1}),
    "factors, no validation": (by_factors, {"limit_val_batches": 0, "max_epochs": 2}),
    "one cycle": (each_step(lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=9)), {"max_epochs": 2}),
    "restarts": (each_step(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)), {"max_epochs": 2}),
    "lambda": (lambda o: [{"scheduler": lr_scheduler.LambdaLR(o, lambda n: 0.9**n), "frequency": 2}], {}),
}


@pytest.mark.turns(6)
@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric .* which is not available")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before `optimizer.step")
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_resumes_exactly_from_everywhere(tmp_path, name):
    make, arguments = CASES[name]
    arguments = {"max_epochs": 3, "accumulate_grad_batches": 1, "num_sanity_val_steps": 0} | arguments

    def run(callbacks, path=None, seed=0):
        over = []
        done = fit(Scheduled(make), [*callbacks, End(over)], path, seed=seed, **arguments)
        metrics = {key: value.item() for key, value in done.callback_metrics.items()}
        weights, *states = final_state(done)
        # In a run that was over when it was saved Lightning does nothing any more.
        return [weights, *([states, metrics] if over else [])]

    expected = run([ExactResume(), SaveEverywhere(tmp_path)])
    assert expected[1][0][0]["param_groups"][0]["lr"] != 0.01  # the schedule has acted
    paths = sorted(tmp_path.glob("*.ckpt"))
    ends = {path.name: run([ExactResume()], path, seed=7) for path in paths}
    assert [name for name, end in ends.items() if not equal(expected[: len(end)], end)] == []
    assert sum(len(end) == len(expected) for end in ends.values()) > len(paths) - 6

"""Count the interruption points that resume bit-exactly, with stock Lightning and with ``ExactResume``.

    python -m benchmarks.exact_resume [--device cpu] [--settings 8]

A small network with dropout, shuffling, random augmentation, accumulation over two batches, momentum and a schedule is
trained once without interruption, with a checkpoint after every batch. The training is then resumed from each
checkpoint in new objects. A point counts if the final weights, optimizer states and scheduler states are equal in every
bit. The benchmark takes about a minute.
"""

import argparse
import contextlib
import io
import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.clock import use_one_thread
from lit_efficient import ExactResume

DEVICE = "cpu"
SETTINGS = {
    "3 epochs": {},
    "validation every 3 batches": {"val_check_interval": 3},
    "2 workers": {"num_workers": 2, "max_epochs": 2},
    "schedule asks for the run's length": {"ask": True, "max_epochs": 2},
    "StepLR by epoch": {"schedule": "step", "val_check_interval": 3},
    "ReduceLROnPlateau by epoch": {"schedule": "plateau", "val_check_interval": 3},
    "ReduceLROnPlateau by step": {"schedule": "plateau", "interval": "step", "val_check_interval": 3},
    "ReduceLROnPlateau, training loss": {"schedule": "plateau", "monitor": "loss"},
}


class Augmented(Dataset):
    def __getitem__(self, index):
        return torch.full((4,), index / 22) + 0.1 * torch.randn(4) + 0.1 * random.random()

    def __len__(self):
        return 22


class Network(pl.LightningModule):
    def __init__(self, ask, num_workers, schedule, interval, monitor):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.ask = ask
        self.num_workers = num_workers
        self.schedule = schedule
        self.config = {"interval": interval, "monitor": monitor, "strict": False}

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - torch.randn((), device=self.device)).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0] + torch.randn(4, device=self.device)).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        length = self.trainer.estimated_stepping_batches if self.ask else 12
        schedules = torch.optim.lr_scheduler
        if self.schedule == "plateau":
            schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        elif self.schedule == "step":
            schedule = schedules.StepLR(optimizer, 1, 0.5)
        else:
            schedule = schedules.CosineAnnealingLR(optimizer, length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.config}}

    def train_dataloader(self):
        return DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


class SaveEveryBatch(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx:03d}.ckpt")


def final_bits(
    seed, callbacks, ckpt_path=None, *, ask=False, num_workers=0, max_epochs=3, schedule="cosine", interval=None,
    monitor="val", **arguments,
):  # fmt: skip
    pl.seed_everything(seed, verbose=False)
    interval = interval or ("step" if schedule == "cosine" else "epoch")
    trainer = pl.Trainer(
        accelerator=DEVICE, devices=1, max_epochs=max_epochs, accumulate_grad_batches=2, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(Network(ask, num_workers, schedule, interval, monitor), ckpt_path=ckpt_path, weights_only=True)
    saved = io.BytesIO()
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    torch.save([dict(trainer.lightning_module.state_dict()), optimizers, schedules], saved)
    return saved.getvalue()


def exact_points(with_callback, arguments):
    def callbacks():
        return [ExactResume()] if with_callback else []

    with tempfile.TemporaryDirectory() as name:
        whole = final_bits(1, [*callbacks(), SaveEveryBatch(Path(name))], **arguments)
        points = sorted(Path(name).glob("*.ckpt"))[:-1]  # after the last batch nothing is left to go wrong
        return sum(final_bits(2, callbacks(), point, **arguments) == whole for point in points), len(points)


def main():
    global DEVICE  # noqa: PLW0603 (read where models are made)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="number of settings to run, from the first")
    options = parser.parse_args()
    DEVICE = options.device
    use_one_thread()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    print(f"{'interruption points that resume exactly':<42}{'stock Lightning':>18}{'ExactResume':>14}")
    failed = False
    for name, arguments in list(SETTINGS.items())[: options.settings]:
        with contextlib.redirect_stderr(io.StringIO()):
            stock, points = exact_points(False, arguments)
            ours, _ = exact_points(True, arguments)
        print(f"{name:<42}{f'{stock} of {points}':>18}{f'{ours} of {points}':>14}", flush=True)
        failed |= ours != points
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""A small network with everything that can go out of step, and a way to interrupt and resume it anywhere."""

import random
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lit_efficient.callbacks.exact_resume import ExactResume
from tests import support


class Augmented(Dataset):
    """Draws from all three global generators for each sample."""

    def __init__(self, n=22):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + torch.randn(4) + random.random() + float(np.random.rand())


class Tiny(pl.LightningModule):
    def __init__(self, data=None, batch_size=3, num_workers=0, ask_length=False, **loader):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.data = Augmented() if data is None else data
        self.arguments = {"batch_size": batch_size, "num_workers": num_workers, "shuffle": True} | loader
        self.ask_length = ask_length
        self.seen = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + torch.randn(4) if self.trainer.training else batch

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.sum().item())
        noise = torch.randn(()) + random.random() + float(np.random.rand())
        return (self.net(batch) - noise).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch[0] + torch.randn(4)).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        total = self.trainer.estimated_stepping_batches if self.ask_length else 12
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(self.data, **self.arguments)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


class SaveEveryBatch(pl.Callback):
    """Saves after every micro-batch, which is where timers and signals may strike."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx:03d}.ckpt")


trainer = partial(
    support.trainer, max_epochs=3, accumulate_grad_batches=2, num_sanity_val_steps=2, limit_val_batches=1.0
)


def fit(module, callbacks, ckpt_path=None, seed=0, loaders=None, datamodule=None, **arguments):
    pl.seed_everything(seed, verbose=False)
    run = trainer(callbacks, **arguments)
    run.fit(module, loaders, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
    return run


def final_state(run):
    """Weights, the optimizers' and the schedulers' states as one nested list."""
    return [
        {name: tensor.clone() for name, tensor in run.lightning_module.state_dict().items()},
        [optimizer.state_dict() for optimizer in run.optimizers],
        [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
        run.global_step,
    ]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return callable(a) or a == b


def count_exact(folder, make, callback=ExactResume, **arguments):
    """Runs once whole, then once from every checkpoint of it: (number of checkpoints, those that ended differently)."""
    folder = Path(folder)
    whole = make()
    expected = final_state(fit(whole, [*([callback()] if callback else []), SaveEveryBatch(folder)], **arguments))
    assert all(torch.isfinite(tensor).all() for tensor in expected[0].values())
    wrong = []
    checkpoints = sorted(folder.glob("*.ckpt"))
    for number, path in enumerate(checkpoints, start=1):
        resumed = make()
        result = final_state(fit(resumed, [callback()] if callback else [], path, seed=99 + number, **arguments))
        if not equal(expected, result) or whole.seen[number:] != resumed.seen:
            wrong.append(path.name)
    return len(checkpoints), wrong

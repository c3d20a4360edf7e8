"""A fit of a few batches in either of Lightning's namespaces, watched by functions that are called at hooks."""

import importlib

import torch
from torch.utils.data import DataLoader, TensorDataset

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]


def trainer(namespace, hooks=None, **options):
    pl = importlib.import_module(namespace)
    watcher = type("Watcher", (pl.Callback,), {name: staticmethod(hook) for name, hook in (hooks or {}).items()})()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**quiet, "max_epochs": 1, "callbacks": [watcher], **options})


def module(namespace):
    pl = importlib.import_module(namespace)

    class Toy(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.validated = []

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).sum()

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.validated.append(batch[0].flatten().tolist())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Toy()


def rows(count=4, **options):
    return DataLoader(TensorDataset(torch.arange(float(count))[:, None]), **options)


def fit(namespace, hooks=None, val=None, **options):
    toy, made = module(namespace), trainer(namespace, hooks, **options)
    made.fit(toy, rows(), val or rows(1))
    return made, toy

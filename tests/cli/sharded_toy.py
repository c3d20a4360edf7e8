"""A module in shards, for the command line: a process or more hold a part each of every weight."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class ShardedToy(L.LightningModule):
    """Two layers under FSDP2."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.net: nn.Module = nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, self.width))
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_fit_end(self) -> None:
        """Say what came of it, in numbers that any bit changes."""
        weights = {name: value.full_tensor() for name, value in self.state_dict().items()}
        states = self.trainer.optimizers[0].state.values()
        moments = [value.full_tensor() for state in states for value in state.values() if hasattr(value, "full_tensor")]
        figures = [value.double().sum().item().hex() for value in [*weights.values(), *moments]]
        print("ended with", *figures, self.trainer.global_step)


class ToyRows(L.LightningDataModule):
    """Rows of exact numbers."""

    def train_dataloader(self) -> Any:
        return DataLoader((torch.arange(64) % 7 - 3).float().reshape(8, 8), 2)

    val_dataloader = train_dataloader

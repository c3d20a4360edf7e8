"""Add techniques to a LightningModule that was written without them: five lines, marked below.

    python examples/add_to_existing_code.py
    python -m lit_efficient fit --config examples/add_to_existing_code.yaml --allow-import examples   # the same run

The module is ordinary: it builds its network in __init__, returns a loss and configures AdamW with a schedule.
"""

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import EMA, ExactResume, LoRA, LowBitOptimizer, SafeCheckpointIO, StochasticDepth


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Regression(L.LightningModule):
    """A small residual network.

    Args:
        width: Features of a row.
        depth: Number of blocks.
        rows: Number of rows to train on.
    """

    def __init__(self, width: int = 64, depth: int = 8, rows: int = 2048) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.blocks(x)).squeeze(-1), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]), batch_size=64, shuffle=True)


def main(max_epochs: int = 10, rows: int = 2048) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    module = Regression(rows=rows)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[
            StochasticDepth(rate=0.3),  # 1: saves the time of the dropped blocks
            LoRA(rank=16, modules_to_save=["head"]),  # 2: trains small matrices beside the frozen ones, and the head
            LowBitOptimizer(bits=8, min_size=1024),  # 3: saves three quarters of the optimizer's memory
            EMA(decay=0.99),  # 4: evaluates an average of the weights
            ExactResume(),  # 5: interrupted and resumed equals uninterrupted
        ],
        plugins=[SafeCheckpointIO()],  # checkpoints that are whole or absent
    )
    trainer.fit(module)
    return trainer


if __name__ == "__main__":
    main()

"""Add techniques to a LightningModule that knows nothing of them: four lines, marked below.

    python examples/add_to_existing_code.py

The module is an ordinary one: it builds its network in __init__, returns a loss and configures AdamW with a schedule.
"""

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import ExactResume, LowBitOptimizer, SafeCheckpointIO, StochasticDepth


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Regression(L.LightningModule):
    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.blocks(x)).squeeze(-1), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=320)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> L.Trainer:
    L.seed_everything(0, verbose=False)
    x = torch.randn(2048, 64)
    data = DataLoader(TensorDataset(x, torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        callbacks=[
            StochasticDepth(rate=0.3),  # saves the time of the dropped blocks
            LowBitOptimizer(bits=8),  # saves three quarters of the optimizer's memory
            ExactResume(),  # interrupted and resumed equals uninterrupted
        ],
        plugins=[SafeCheckpointIO()],  # checkpoints that are whole or absent
    )
    trainer.fit(Regression(), data)
    return trainer


if __name__ == "__main__":
    main()

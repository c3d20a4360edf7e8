"""Your own vision transformer on scikit-learn's digits, with stochastic depth, averaged weights and exact resume.

    python examples/vision_transformer.py

The techniques find the residual blocks automatically. Validation uses the average; a resumed run is bit-exact.
"""

import lightning.pytorch as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import EMA, ExactResume, FusedAdamW, NonFiniteGuard, StochasticDepth


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, tokens, width]
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Classifier(L.LightningModule):
    def __init__(self, width: int = 48, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)  # [B, 1, 8, 8] -> [B, width, 4, 4]
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val/accuracy", (self(images).argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return FusedAdamW(self.parameters(), lr=2e-3, weight_decay=0.05, decay_norm_and_bias=False)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images [N, 1, 8, 8] in [0, 1] with their labels: to train on, and held out."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main(max_epochs: int = 15) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    train, held_out = digits()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[StochasticDepth(rate=0.1), EMA(decay=0.99), ExactResume(), NonFiniteGuard()],
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=297))
    return trainer


if __name__ == "__main__":
    print(f"accuracy of the average: {float(main().callback_metrics['val/accuracy']):.3f}")

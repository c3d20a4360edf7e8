"""Your own language model: a loss without full logits, and recomputed activations.

    python examples/own_transformer.py

``ChunkedCrossEntropy`` needs three things of a network: ``forward(ids, labels=...)``, a linear ``head``, and
``loss_function``. The blocks to recompute are found automatically.
"""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_efficient import ActivationCheckpointing, ChunkedCrossEntropy, ExactResume
from lit_efficient.losses.next_token import token_losses

TEXT = (__doc__ or "") * 40


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Network(nn.Module):
    loss_function = staticmethod(token_losses)

    def __init__(self, vocabulary: int = 256, width: int = 64, depth: int = 4, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else self.loss_function(logits, labels)


class Bytes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(batch[:, :-1], labels=batch[:, 1:]).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        ids = torch.tensor(list(TEXT.encode()))
        rows: Any = ids[: len(ids) // 129 * 129].view(-1, 129)  # a tensor is a sequence of its rows
        return DataLoader(rows, batch_size=16, shuffle=True)


def main(max_epochs: int = 20) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[ChunkedCrossEntropy(), ActivationCheckpointing(), ExactResume()],
    )
    trainer.fit(Bytes())
    return trainer


if __name__ == "__main__":
    print(f"loss: {float(main().callback_metrics['train/loss']):.3f}")

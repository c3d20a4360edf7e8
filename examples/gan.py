"""A GAN with two optimizers and manual optimization: the averaged generator draws better digits.

    python examples/gan.py

Techniques that need one loss and one step refuse such a module; averages, guards and exact resume work.
"""

from typing import Any

import lightning.pytorch as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_efficient import EMA, ExactResume, NonFiniteGuard

NOISE = 16


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.judge = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_generator, of_judge = optimizers
        fake = self.generator(torch.randn(len(batch), NOISE, device=self.device))

        loss = nn.functional.softplus(self.judge(fake.detach())) + nn.functional.softplus(-self.judge(batch))
        of_judge.zero_grad()
        self.manual_backward(loss.mean())
        of_judge.step()

        of_generator.zero_grad()
        self.manual_backward(nn.functional.softplus(-self.judge(fake)).mean())
        of_generator.step()
        self.log("train/judge", loss.mean(), prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.99)) for part in (self.generator, self.judge)
        ]

    def train_dataloader(self) -> DataLoader[Tensor]:
        images: Any = torch.tensor(load_digits().data, dtype=torch.float32) / 16  # a tensor is a sequence of its rows
        return DataLoader(images, batch_size=64, shuffle=True, drop_last=True)


def main(max_epochs: int = 40) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[EMA(decay=0.995), ExactResume(), NonFiniteGuard()],
    )
    trainer.fit(GAN())
    return trainer


if __name__ == "__main__":
    from lit_efficient import restore

    trainer = main()
    trainer.save_checkpoint("gan.ckpt")
    generator = restore(GAN(), "gan.ckpt").generator  # the average; weights="raw" has the others
    for row in generator(torch.randn(1, NOISE)).view(8, 8):
        print("".join(" .:-=+*#%@"[int(9 * value)] * 2 for value in row))

"""Compare the suggestions of LRFinder with the best rate of a grid by the loss after 150 steps.

    python -m benchmarks.rate_finder [--seeds 8] [--first 0] [--batches 4 8 32] [--tasks linear tanh digits gpt]

The tasks are a linear regression, a regression with a hidden layer, the digits of scikit-learn, and a GPT of one block
on the source of a module of Python. The grid has two rates in each factor of ten. Its loss is that of all data. A
suggestion is wrong if it is more than ten times below or three times above the best rate; a refusal is not a
suggestion.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import ConfigurationError, GPTConfig, LRFinder
from lit_efficient.data.digit_images import load_digit_images
from lit_efficient.models.networks.gpt import GPT

GRID = [10 ** (half / 2) for half in range(-8, 3)]
STEPS = 150
LOW, HIGH = 1 / 10, 3  # allowed ratios of the suggestion to the best rate
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}


def linear(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a linear network and 1,024 noisy values of a linear function of 8 numbers."""
    x, y, _ = _regression(seed, 8)
    return nn.Linear(8, 1), x, y


def tanh(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with a hidden layer and 1,024 noisy values of a bounded function of 16 numbers."""
    x, y, noise = _regression(seed, 16)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), x, (2 * (y - noise)).tanh() + noise / 2


def digits(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a classifier with a hidden layer and the 1,797 digits."""
    images, labels = load_digit_images(8)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), images.flatten(1), labels


def gpt(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a GPT and 512 rows of 16 bytes of source text."""
    with open(argparse.__file__, "rb") as file:
        text = [min(byte, 127) for byte in file.read(512 * 17)]
    rows = torch.tensor(text).view(512, 17)
    config = GPTConfig(128, dim=16, depth=1, num_heads=2, hidden_dim=32, max_length=16)
    return GPT(config), rows[:, :-1], rows[:, 1:]


TASKS: dict[str, Callable[[int], tuple[nn.Module, Tensor, Tensor]]] = {
    "linear": linear,
    "tanh": tanh,
    "digits": digits,
    "gpt": gpt,
}


def _regression(seed: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(1024, width, generator=generator)
    weight = torch.randn(width, 1, generator=generator) / width**0.5
    noise = 0.2 * torch.randn(1024, 1, generator=generator)
    return x, x @ weight + noise, noise


def loss_of(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the squared error for targets that are floats, and the cross-entropy for classes."""
    output = network(x)
    if y.is_floating_point():
        return F.mse_loss(output, y)
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Task(pl.LightningModule):
    """A network that is trained with one optimizer."""

    def __init__(self, network: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.network, *batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=1e-3)


def best_rate(task: str, optimizer: str, batch: int, seed: int) -> tuple[float, float]:
    """Return the rate of the grid with the lowest loss after the steps of a plain loop, and this loss."""
    losses = {}
    for rate in GRID:
        torch.manual_seed(seed)
        network, x, y = TASKS[task](seed)
        stepper = OPTIMIZERS[optimizer](network.parameters(), lr=rate)
        order = torch.Generator().manual_seed(seed)
        for _ in range(STEPS):
            rows = torch.randint(len(x), (batch,), generator=order)
            loss = loss_of(network, x[rows], y[rows])
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            if not loss.isfinite():
                break
        with torch.no_grad():
            final = float(loss_of(network, x, y))
        losses[rate] = final if math.isfinite(final) else math.inf
    best = min(losses, key=lambda rate: losses[rate])
    return best, losses[best]


def suggested(task: str, optimizer: str, batch: int, seed: int, steps: int) -> tuple[float | None, str]:
    """Return the suggestion of LRFinder, or ``None`` and the reason of the refusal."""
    torch.manual_seed(seed)
    network, x, y = TASKS[task](seed)
    finder = LRFinder(num_steps=steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Task(network, optimizer), DataLoader(TensorDataset(x, y), batch, shuffle=True, drop_last=True))
    except ConfigurationError as error:
        return None, str(error)
    return finder.suggestion, ""


def main() -> None:
    """Print a row for each task, optimizer and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--show", action="store_true", help="print each refusal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    print("task    optimizer batch   suggestion / best rate of the grid, by seed (-: refused)               wrong")
    wrong = 0
    for task in options.tasks:
        for optimizer in OPTIMIZERS:
            for batch in options.batches:
                ratios: list[float | None] = []
                for seed in range(options.first, options.first + options.seeds):
                    best, _ = best_rate(task, optimizer, batch, seed)
                    rate, reason = suggested(task, optimizer, batch, seed, options.steps)
                    ratios.append(None if rate is None else rate / best)
                    if reason and options.show:
                        print(f"  seed {seed}: {reason}")
                row = " ".join("     -" if ratio is None else f"{ratio:6.2f}" for ratio in ratios)
                bad = sum(ratio is not None and not LOW <= ratio <= HIGH for ratio in ratios)
                wrong += bad
                print(f"{task:8}{optimizer:10}{batch:5}  {row}   {bad}", flush=True)
    print(f"{wrong} suggestions are wrong")


if __name__ == "__main__":
    main()

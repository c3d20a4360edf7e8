"""Toy networks, modules and trainers for the contract tests: small, deterministic, of every shape a user's may have."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient.losses.next_token import token_losses
from lit_efficient.models.gpt import GPT, GPTConfig
from tests.processes import run_file, run_ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    takes_labels = False

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AttentionNet(nn.Module):
    """A network for techniques that need attention: each of the WIDTH numbers of a row is one of eight tokens."""

    takes_labels = False

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(8, dim=WIDTH, depth=4, num_heads=2, hidden_dim=32, max_length=64, tie_embeddings=False)
        self.gpt = GPT(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (2 * x + 4).long().clamp(0, 7)
        return self.gpt(tokens)[..., 0]  # [B, WIDTH], as from Net


class TokenNet(Net):
    """A network of one token a sequence that gives losses for labels: (B, width) to (B, width) or (B,)."""

    takes_labels = True
    loss_function = staticmethod(token_losses)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return super().forward(x)
        logits = super().forward(x[:, None])
        return self.loss_function(logits, labels[:, None])[:, 0]


class TokenAttentionNet(AttentionNet):
    """Attention over tokens, and losses for labels."""

    takes_labels = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return super().forward(x)
        tokens = (2 * x + 4).long().clamp(0, 7)
        return self.gpt(tokens, labels=tokens.flip(-1)).mean(-1)


@functools.cache
def convolved(network: type[nn.Module]) -> type[nn.Module]:
    """The network behind a convolution over each row, as an image of four by four pixels."""

    class Convolved(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(1, 3, 3, padding=1)
            self.mix = nn.Conv2d(3, 1, 3, padding=1)

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            image = x.unflatten(-1, (1, 4, WIDTH // 4))
            return super().forward(x + self.mix(self.filters(image).tanh()).flatten(1), **arguments)

    Convolved.forward.__signature__ = inspect.signature(network.forward)  # type: ignore[attr-defined]
    return Convolved


class ToyMethods:
    """The body of a LightningModule, for either namespace. It knows nothing of techniques."""

    prediction = "eps"
    network: type[nn.Module] = Net

    def __init__(
        self,
        where: str = "init",
        scheduler: str = "none",
        protocol: bool = True,
        optimizers: int = 1,
        network: type[nn.Module] = Net,
    ) -> None:
        super().__init__()
        self.network = network
        self.where, self.scheduler, self.protocol, self.optimizers_wanted = where, scheduler, protocol, optimizers
        self.automatic_optimization = optimizers == 1
        self.net: nn.Module | None = None
        if where == "init":
            self._build()

    def _build(self) -> None:
        if self.net is None:
            state = torch.get_rng_state()
            torch.manual_seed(1)
            self.net = self.network()
            torch.set_rng_state(state)

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self._build()

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self._build()

    def _sample_loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        if self.network.takes_labels:  # which of its numbers is the largest?
            return self.net(x, labels=x.argmax(-1))
        return (self.net(x) - x.flip(-1)).square().mean(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sample_loss = self._sample_loss(batch)
        loss = sample_loss.mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return None
        self.log("train/loss", loss.detach())
        if not self.protocol:
            return loss
        log_snr = batch[0].detach().mean(-1) * 4
        return {"loss": loss, "sample_loss": sample_loss, "log_snr": log_snr}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._sample_loss(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self._sample_loss(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def num_tokens(self, batch: Any) -> int:
        return len(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizers_wanted > 1:
            return [
                torch.optim.AdamW(self.net.stem.parameters(), lr=1e-2),
                torch.optim.AdamW([*self.net.blocks.parameters(), *self.net.head.parameters()], lr=1e-2),
            ]
        decay = [p for p in self.net.parameters() if p.ndim > 1]
        rest = [p for p in self.net.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.1, "name": "decay"}, {"params": rest, "lr": 5e-3, "name": "rest"}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))
        return SCHEDULERS[self.scheduler](optimizer)


def _step(scheduler: Any) -> dict[str, Any]:
    return {"scheduler": scheduler, "interval": "step"}


_lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "none": lambda o: o,
    "list": lambda o: [o],
    "dict": lambda o: {"optimizer": o},
    "list_of_dicts": lambda o: ({"optimizer": o, "lr_scheduler": _step(_lr.ConstantLR(o))},),
    "two_lists": lambda o: ([o], [_lr.StepLR(o, 1)]),
    "lambda": lambda o: {"optimizer": o, "lr_scheduler": _step(_lr.LambdaLR(o, lambda i: 1 / (1 + i)))},
    "one_cycle": lambda o: {"optimizer": o, "lr_scheduler": _step(_lr.OneCycleLR(o, 1e-2, total_steps=20))},
    "sequential": lambda o: {
        "optimizer": o,
        "lr_scheduler": _step(
            _lr.SequentialLR(o, [_lr.LinearLR(o, 0.1, total_iters=3), _lr.CosineAnnealingLR(o, 17)], milestones=[3])
        ),
    },
    "chained": lambda o: {
        "optimizer": o,
        "lr_scheduler": _step(_lr.ChainedScheduler([_lr.ConstantLR(o), _lr.ExponentialLR(o, 0.9)])),
    },
    "plateau": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": _lr.ReduceLROnPlateau(o, patience=0), "monitor": "val/loss"},
    },
}


class Toy(ToyMethods, L.LightningModule):
    """The toy of ``lightning.pytorch``."""


class ToyOnBatch(Toy):
    """A training step that takes the batch alone, as Lightning allows."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def data(rows: int = 16, batch_size: int = 4, shuffle: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH, generator=generator)), batch_size, shuffle=shuffle)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 2,
}


def trainer(callbacks: list[Any] | None = None, *, namespace: Any = L, **arguments: Any) -> Any:
    """A quiet trainer of four steps (one epoch of :func:`data`) unless told otherwise."""
    return namespace.Trainer(callbacks=callbacks or [], **{**QUIET, "max_epochs": 1, **arguments})


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_equal(a: Any, b: Any) -> None:
    """Bitwise equality of nested states, with the path of what differs."""
    differences = list(_differences(a, b, ""))
    assert not differences, f"{len(differences)} differ, first: {differences[:3]}"


def _differences(a: Any, b: Any, path: str) -> Any:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            yield path
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            yield f"{path}: keys {sorted(set(map(str, a)) ^ set(map(str, b)))}"
        for key in a.keys() & b.keys():
            yield from _differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            yield from _differences(x, y, f"{path}/{i}")
    elif a != b:
        yield f"{path}: {a!r} != {b!r}"


def run_script(source: str, folder: Path, processes: int = 1, timeout: int = 240) -> str:
    """Run ``source`` in a fresh process, or in ranks as torchrun would start them, and return what they printed."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    if processes > 1:
        return run_ranks(run_file, folder, script, processes=processes, timeout=timeout)
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout

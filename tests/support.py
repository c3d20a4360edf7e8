"""Toy networks, modules and trainers for the contract tests: small, deterministic, of every shape a user's may have."""

from __future__ import annotations

import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import testing
from lit_efficient.losses.next_token import token_losses
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.testing import QUIET, WIDTH, Block, Net, assert_equal, trainer, weights
from tests import processes

__all__ = ["QUIET", "WIDTH", "Block", "Net", "assert_equal", "trainer", "weights"]  # and what is defined below


class AttentionNet(nn.Module):
    """A network for techniques that need attention: each of the WIDTH numbers of a row is one of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(8, dim=WIDTH, depth=4, num_heads=2, hidden_dim=32, max_length=64, tie_embeddings=False)
        self.gpt = GPT(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (2 * x + 4).long().clamp(0, 7)
        return self.gpt(tokens)[..., 0]  # [B, WIDTH], as from Net


class PaddedNet(Net):
    """A network that takes shorter rows, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (0, WIDTH - x.shape[-1])))[..., : x.shape[-1]]


class TokenNet(Net):
    """A network of one token a sequence that gives losses for labels: (B, width) to (B, 24) or (B,)."""

    takes_labels = True
    loss_function = staticmethod(token_losses)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 24)  # a size that nothing else has

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = nn.functional.pad(x, (0, WIDTH - x.shape[-1]))
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
            image = x.unflatten(-1, (1, 4, -1))
            return super().forward(x + self.mix(self.filters(image).tanh()).flatten(1), **arguments)

    Convolved.forward.__signature__ = inspect.signature(network.forward)  # type: ignore[attr-defined]
    return Convolved


@functools.cache
def normed(network: type[nn.Module]) -> type[nn.Module]:
    """The network behind a convolution over each row with an instance norm."""

    class Normed(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.kernels = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.InstanceNorm1d(3), nn.Conv1d(3, 1, 1))

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            return super().forward(x + self.kernels(x[:, None])[:, 0].tanh(), **arguments)

    Normed.forward.__signature__ = inspect.signature(network.forward)  # type: ignore[attr-defined]
    return Normed


class Mixture(nn.Module):  # no PreTrainedModel, which peft would take for the network
    """A small mixture of experts of transformers, over tokens of eight numbers."""

    def __init__(self) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        super().__init__()
        self.config: Any = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4)
        self.set_experts_implementation("grouped_mm")
        self.mlp = MixtralSparseMoeBlock(self.config)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def _can_set_experts_implementation(self) -> bool:
        return True

    def set_experts_implementation(self, name: str) -> None:
        self.config._experts_implementation = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@functools.cache
def routed(network: type[nn.Module]) -> type[nn.Module]:
    """The network behind a small mixture of experts, over each row as two tokens of eight numbers."""

    class Routed(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Mixture()

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            padded = nn.functional.pad(x, (0, WIDTH - x.shape[-1]))
            mixed = self.mixture(padded.unflatten(-1, (-1, 8))).flatten(-2)
            return super().forward(x + mixed[..., : x.shape[-1]].tanh(), **arguments)

    Routed.forward.__signature__ = inspect.signature(network.forward)  # type: ignore[attr-defined]
    return Routed


@functools.cache
def lowered(network: type[nn.Module]) -> type[nn.Module]:
    """The network with a matrix in bfloat16, whatever it gives times that one's mean, which is one."""

    class Lowered(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            return super().forward(x, **arguments) * self.low.float().mean()

    Lowered.forward.__signature__ = inspect.signature(network.forward)  # type: ignore[attr-defined]
    return Lowered


class Toy(testing.Toy):
    """The toy of the contract, of every shape a user's module may have."""

    def __init__(
        self,
        where: str = "init",
        scheduler: str = "none",
        protocol: bool = True,
        optimizers: int = 1,
        network: type[nn.Module] = Net,
    ) -> None:
        super().__init__(where, network)
        self.scheduler, self.protocol, self.optimizers_wanted = scheduler, protocol, optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            output = super().training_step(batch, batch_idx)
            return output if self.protocol else output["loss"]
        loss = self._sample_loss(batch).mean()
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def num_tokens(self, batch: Any) -> int:
        return len(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizers_wanted > 1:
            return [
                torch.optim.AdamW(self.net.stem.parameters(), lr=1e-2),
                torch.optim.AdamW([*self.net.blocks.parameters(), *self.net.head.parameters()], lr=1e-2),
            ]
        optimizer = torch.optim.AdamW(self.groups(), lr=1e-2, betas=(0.8, 0.95))
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


class ToyOnBatch(Toy):
    """A training step that takes the batch alone, as Lightning allows."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class SlowClock:
    """Stand-in for the module ``time``: 10 seconds pass with each look at it."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 10.0
        return self.now


def data(rows: int = 16, batch_size: int = 4, shuffle: bool = False) -> DataLoader:
    """Four batches, unless said otherwise."""
    return testing.data(rows, batch_size, shuffle)


def run_script(source: str, folder: Path, timeout: int = 240) -> str:
    """Run ``source`` in a fresh process, where what is tested is its start, and return what it printed."""
    script = folder / "script.py"
    script.write_text("import warnings\nwarnings.simplefilter('ignore')\n" + textwrap.dedent(source))
    done = processes.python(script, cwd=folder, timeout=timeout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout

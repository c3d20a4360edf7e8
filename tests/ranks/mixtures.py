"""MixtureOfExperts and MixtureOfDepths on two ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_efficient import LossFreeBalancing, MixtureOfDepths, MixtureOfExperts
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from tests.callbacks.test_experts_backend import decoder
from tests.ranks.toys import weights_of_all
from tests.support import assert_equal, trainer


class Language(L.LightningModule):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(GPTConfig(16, dim=16, depth=2, num_heads=2, hidden_dim=16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0].long()
        return F.cross_entropy(self.network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def techniques() -> list[Any]:
    """Losses that are means over tokens, so that two ranks' are those of one process with both batches."""
    return [MixtureOfExperts(4, 1, balance_loss=0.0, bias_rate=0.125), MixtureOfDepths(0.5)]


def tokens(ranks: int) -> DataLoader:
    """Three batches of four rows, parted between the ranks."""
    rows = TensorDataset(torch.randint(0, 16, (12, 9), generator=torch.Generator().manual_seed(1)))
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    return DataLoader(rows, 4 // ranks, sampler=DistributedSampler(rows, ranks, rank, shuffle=False))


def weights(strategy: Any, devices: int) -> dict[str, Tensor]:
    """After three steps; alike on all ranks."""
    module = Language()
    trainer(techniques(), devices=devices, strategy=strategy, max_epochs=1).fit(module, tokens(devices))
    if devices > 1:
        ours, theirs = weights_of_all(module)
        assert_equal(ours, theirs)
    return module.state_dict()


def equal_on_all_ranks() -> None:
    torch.save(weights("ddp", 2), "ddp.pt")


class Pretrained(Language):
    """A small Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.network: Any = decoder("Mixtral")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0] % 8
        return self.network(ids, labels=ids).loss


def biases(strategy: Any, devices: int) -> Tensor:
    """Those of all routers after three steps."""
    module = Pretrained()
    trainer([LossFreeBalancing(0.125)], devices=devices, strategy=strategy, max_epochs=1).fit(module, tokens(devices))
    return torch.stack([buffer for name, buffer in module.named_buffers() if name.endswith("router_bias")])


def biases_on_two_ranks() -> None:
    torch.save(biases("ddp", 2), "biases.pt")

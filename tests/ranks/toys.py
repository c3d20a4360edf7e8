"""What several of them use: a toy in shards, and what all ranks hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support import Net, Toy


class Small(Net):
    """A network of two blocks: each tensor is gathered and scattered one by one."""

    def __init__(self) -> None:
        super().__init__(depth=2)


def shard(module: Any, blocks: nn.ModuleList) -> None:
    mesh = module.device_mesh["data_parallel"]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module.net, mesh=mesh)


class Sharded(Toy):
    """FSDP2 over each block and the rest."""

    def configure_model(self) -> None:
        if not isinstance(self.net, nn.Module):
            super().configure_model()
            shard(self, self.net.blocks)


def sharding(save_distributed_checkpoint: bool = True) -> ModelParallelStrategy:
    return ModelParallelStrategy(2, 1, save_distributed_checkpoint=save_distributed_checkpoint)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state without shards."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def everyones(value: Any) -> list[Any]:
    """The value of each rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def weights_of_all(module: nn.Module) -> list[dict[str, torch.Tensor]]:
    return everyones(whole(module.state_dict()))

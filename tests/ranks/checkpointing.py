"""ActivationCheckpointing and ActivationOffload on two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lit_efficient
from lit_efficient import ActivationCheckpointing, LoRA
from lit_efficient.application import transform_by
from tests.ranks.toys import Small, shard, sharding
from tests.support import Toy, assert_equal, data, trainer

Make = Callable[[], list[Any]]


class ActivationOffload(lit_efficient.ActivationOffload):
    def check(self, trainer: Any, module: Any) -> None:
        """Copy on the CPU, too."""


class Dropping(Small):
    """Blocks that draw random numbers, which a second forward could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        block: Any
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.4))


class Watched(Toy):
    """Notes whole gradients and the bytes that are kept for the backward pass on the device, weights left out."""

    def __init__(self, network: Any, make: Make | None = None, shards: bool = False) -> None:
        super().__init__("configure_model", network=network)
        self.make, self.shards, self.kept = make, shards, 0
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Module):
            return
        super().configure_model()
        if self.make is not None:  # surgery first, shards after it
            transform_by(self, self.make())
        if self.shards:
            shard(self, self.net.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = 0

        def note(tensor: Tensor) -> Tensor:
            weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            self.kept += 0 if weight else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        named = ((name, p.grad) for name, p in self.named_parameters() if p.grad is not None)
        self.gradients = {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in named}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(module: Watched, techniques: list[Any], strategy: Any) -> Watched:
    dataset = data(16).dataset
    ranked = dist.is_initialized() or strategy is not None
    sampler: Any = DistributedSampler(dataset, 2, _rank(), shuffle=False) if ranked else None
    loader = DataLoader(dataset, 4 if ranked else 8, sampler=sampler)  # rows 0, 2, 4 of each batch and 1, 3, 5
    more = {"devices": 2, "strategy": strategy} if ranked else {}
    run = trainer(techniques, max_steps=2, limit_val_batches=0, use_distributed_sampler=False, **more)
    torch.manual_seed(_rank())
    run.fit(module, loader, data())
    return module


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


MODES: dict[str, Make] = {
    "all": lambda: [ActivationCheckpointing()],
    "every second": lambda: [ActivationCheckpointing(every=2)],
    "operators": lambda: [ActivationCheckpointing(save=["matmul", "attention"])],
    "budget": lambda: [ActivationCheckpointing(memory_budget=0.5)],
    "offloaded": lambda: [ActivationOffload(min_bytes=1)],
    "recomputed, offloaded": lambda: [ActivationCheckpointing(), ActivationOffload(min_bytes=1)],
}


def gradients_are_the_plain_ones(shards: bool) -> None:
    def strategy() -> Any:
        return sharding() if shards else "ddp"

    plain = fit(Watched(Dropping, None, shards), [], strategy())
    again = fit(Watched(Dropping, None, shards), [], strategy())
    assert_equal(plain.gradients, again.gradients)
    kept = {}
    for name, make in MODES.items():
        inside = [False, True] if shards and name in ("all", "offloaded") else [False]
        for before in inside:  # the surgery comes before the shards, or after them
            module = Watched(Dropping, make if before else None, shards)
            fit(module, make(), strategy())
            assert_equal(plain.gradients, module.gradients, f"{name}, {before}")
            kept[name] = module.kept
    assert kept["all"] < kept["every second"] < plain.kept
    assert kept["all"] < kept["budget"] < plain.kept
    assert kept["operators"] < plain.kept
    assert kept["recomputed, offloaded"] <= kept["offloaded"] < kept["all"]

    def adapted() -> list[Any]:
        return [LoRA(rank=2), ActivationCheckpointing()]

    module = fit(Watched(Dropping, adapted if shards else None, shards), adapted(), strategy())
    lora = fit(Watched(Dropping, (lambda: [LoRA(rank=2)]) if shards else None, shards), [LoRA(rank=2)], strategy())
    assert module.gradients
    assert_equal(lora.gradients, module.gradients)
    assert module.kept < lora.kept

    module = fit(Watched(Small, None, shards), MODES["all"](), strategy())
    if dist.get_rank() == 0:
        torch.save(module.gradients, "whole.pt")
    dist.barrier()

"""Optimizer states in CPU memory: each step brings them to the GPU a piece at a time and takes them back.

    for each piece of the parameters:  states -> GPU,  step,  states -> CPU;  the copies run beside the steps

Saves: the optimizer's states on the GPU: 8 bytes a parameter with AdamW, all but those of three pieces
Costs: twice the states' bytes over the bus in each step: 0.3 s a billion parameters at 50 GB/s; as much CPU memory
Source: Rajbhandari et al. (2021), https://arxiv.org/abs/2104.07857; here states are streamed, not gradients

torchao's ``CPUOffloadOptimizer`` steps on the CPU; it has no ``state`` and no ``defaults``, hides the groups that the
user made and forbids clipping. Streaming keeps torch's own step on the GPU: any optimizer class, bit by bit the same
numbers, groups, schedulers, clipping and checkpoints as without it.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.optimizers.host_states import HostStates, Streamed, stream_states
from lit_efficient.surgery import is_sharded
from lit_efficient.technique import Technique


class OffloadOptimizer(Technique):
    """Keep the states of the optimizer that the module returns, whatever its class, in CPU memory.

    Args:
        piece_mb: Parameters whose states are on the GPU at a time, in MB, at least 1. Large pieces launch few kernels.

    Raises:
        ConfigurationError: Without a GPU, where the states are in CPU memory anyway; for sharded parameters (DTensors);
            for an argument out of range.
    """

    phase = Phase.OPTIMIZER
    conflicts: ClassVar[dict[str, str]] = {
        "LowBitOptimizer": "both decide where the states live: use LowBitOptimizer(paged=True), which does both"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (5, "all of the optimizer's states, for transfers in each step")
    }

    def __init__(self, piece_mb: int = 256) -> None:
        super().__init__()
        check_number("OffloadOptimizer", "piece_mb", piece_mb, least=1, whole=True)
        self.piece_mb = piece_mb
        self._said = False

    def check(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device.type
        if device == "cpu":
            raise ConfigurationError(
                "OffloadOptimizer: this trainer's device is 'cpu', where optimizer states are in CPU memory already: "
                "there is nothing to save. Use accelerator='gpu', or LowBitOptimizer to save CPU memory"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Let ``optimizer`` stream its states."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_sharded, parameters)):
            raise ConfigurationError("OffloadOptimizer: sharded parameters (DTensors) bring CPU offload of their own")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError("OffloadOptimizer: LBFGS keeps one state for all parameters, which has no pieces")
        stream_states(optimizer, self.piece_mb * 2**20)
        total = sum(p.numel() for p in parameters)
        return Report(
            f"{type(optimizer).__name__}: states of {total:,} parameters in CPU memory, those of {self.piece_mb} MB of "
            "parameters at a time on the device",
            parameters=total,
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning moves restored states to the device; take them back before the first activations."""
        for store in self._stores(trainer):
            for piece in store.all_pieces():
                store.put_back(piece)
            store.finish()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Say once how much memory the states take: only the first step makes them."""
        stores = list(self._stores(trainer))
        if not self._said and all(store.held for store in stores):
            self._said = True
            held, states = (sum(sizes) for sizes in zip(*((store.held, store.state_bytes) for store in stores)))
            rank_zero_info(
                f"OffloadOptimizer: {states / 2**20:.1f} MiB of states in {held / 2**20:.1f} MiB of pinned CPU memory"
            )

    def _stores(self, trainer: Any) -> Iterator[HostStates]:
        yield from (o.host_states for o in trainer.optimizers if isinstance(o, Streamed))

"""Load balancing of experts by a bias of the router, which changes after each step.

    b_e <- b_e + bias_rate * sign(mean load - load_e)      load_e: choices of expert e in a step, by all processes

A step that a gradient scaler skips counts, because its choices are valid although its gradients are not.

Source: Wang et al. (2024), https://arxiv.org/abs/2408.15664, algorithm 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.loss import LossHooks
from lit_efficient.mechanisms.side_terms import SideTerms, parts_of
from lit_efficient.models.networks.expert_layers import balanced_bias
from lit_efficient.models.networks.token_rows import rows_in


class BalancesLoads(LossHooks):
    """Mix-in of a technique whose modules count choices in ``router_load`` while they collect side terms."""

    bias_rate: float  # change of the bias in each step; 0 for none
    _terms: SideTerms
    _steps = 0

    def biases(self, module: nn.Module) -> list[tuple[Any, Tensor]]:
        """Return the modules that count choices, with their biases."""
        return [(part, part.router_bias) for part in parts_of(module, self._terms.kind)]

    @contextmanager
    def watch_step(self, module: nn.Module, batch: object) -> Iterator[None]:
        parts = parts_of(module, self._terms.kind)
        rows = rows_in(batch)
        for part in parts:
            part.token_rows = rows
        try:
            with self._terms.collecting(module):
                yield
        finally:
            for part in parts:
                part.token_rows = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        for part in parts_of(pl_module, self._terms.kind):
            part.router_load = None  # batches before the first step must not count

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int) -> None:
        if not self.bias_rate or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        counted = [(part, bias) for part, bias in self.biases(pl_module) if part.router_load is not None]
        if not counted:
            return
        loads = trainer.strategy.reduce(torch.stack([part.router_load for part, _ in counted]), reduce_op="sum")
        for (part, bias), load in zip(counted, loads, strict=True):
            bias.copy_(balanced_bias(bias, load, self.bias_rate))
            part.router_load = None

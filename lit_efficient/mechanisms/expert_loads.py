"""Load balancing of experts by a bias of the router, which changes after each step.

    b_e <- b_e + bias_rate * sign(mean load - load_e)      load_e: choices of expert e in a step, by all processes

A step that a gradient scaler skips counts, because its choices are valid although its gradients are not.

Source: Wang et al. (2024), https://arxiv.org/abs/2408.15664, algorithm 1.
"""

from collections.abc import Iterator, Sequence
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
    _counting: Sequence[Any] = ()  # modules that count choices, in a fit of one process
    _resumed: Sequence[Tensor | None] = ()  # choices in the open accumulation window of a checkpoint

    def biases(self, module: nn.Module) -> list[tuple[Any, Tensor]]:
        """Return the modules that count choices, with their biases."""
        return [(part, part.router_bias) for part in parts_of(module, self._terms.kind)]

    @contextmanager
    def watch_step(self, module: nn.Module, batch: object) -> Iterator[None]:
        parts = parts_of(module, self._terms.kind)
        # An open window continues only if its gradients were restored as well.
        if self._resumed and any(p.grad is not None for p in module.parameters()):
            for part, load in zip(self._counting, self._resumed, strict=True):
                part.router_load = load
        self._resumed = ()
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
        parts = parts_of(pl_module, self._terms.kind)
        for part in parts:
            part.router_load = None  # batches before the first step must not count
        self._counting = parts if self.bias_rate and trainer.world_size == 1 else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the choices in an open accumulation window. `ExactResume` saves its gradients, on one process only."""
        loads = [part.router_load for part in self._counting]
        if all(load is None for load in loads):
            return {}
        return {"loads": loads}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict.get("loads", ())

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

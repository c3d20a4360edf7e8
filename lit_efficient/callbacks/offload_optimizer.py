"""Optimizer states in CPU memory: each step brings them to the GPU a piece at a time and takes them back.

    for each piece of the parameters:  states -> GPU,  step,  states -> CPU;  the copies run beside the steps

Saves: the optimizer's states on the GPU: 8 bytes a parameter with AdamW, all but those of three pieces
Costs: twice the states' bytes over the bus in each step: 0.3 s a billion parameters at 50 GB/s; as much CPU memory
    with ``gradients``: the gradients on the GPU but for one piece, for as much over the bus and in CPU memory
Source: Rajbhandari et al. (2021), https://arxiv.org/abs/2104.07857; there the CPU steps, here states are streamed

torchao's ``CPUOffloadOptimizer`` steps on the CPU; it has no ``state`` and no ``defaults``, hides the groups that the
user made and forbids clipping. Streaming keeps torch's own step on the GPU: any optimizer class, bit by bit the same
numbers, groups, schedulers, clipping and checkpoints as without it.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number
from lit_efficient.internals.lightning_loops import accumulates, zeroes_by_hand
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.optimizers.host_states import HostStates, Streamed, stream_states
from lit_efficient.optimizers.later_reads import kept_by
from lit_efficient.surgery import is_sharded
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class OffloadOptimizer(OptimizerHooks, Technique):
    """Keep the states of the optimizer that the module returns, whatever its class, in CPU memory.

    Args:
        piece_mb: Parameters whose states are on the GPU at a time, in MB, at least 1. Large pieces launch few kernels.
        gradients: Keep gradients in CPU memory, too: each leaves the GPU as soon as the backward pass has made it, and
            is clipped there. Those of accumulated batches are added on the GPU, one at a time.

    Raises:
        ConfigurationError: Without a GPU, where the states are in CPU memory anyway; for sharded parameters (DTensors);
            for an argument out of range; where something reads ``parameter.grad`` that is in CPU memory.
        ConflictError: Of gradients with manual optimization, a gradient scaler (16-mixed), and strategies that keep
            gradients themselves (DDP) or join parameters.
    """

    phase = Phase.OPTIMIZER
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "BlockSwap(trained=True)": "states of weights in CPU memory are there, too: leave OffloadOptimizer out",
        "LowBitOptimizer": "both decide where the states live: use LowBitOptimizer(paged=True), which does both",
        Trait.SCHEDULE_FREE: (
            "swapping the weights needs the optimizer's states on the device of the parameters: keep one of them"
        ),
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (9, "all of the optimizer's states, for transfers in each step")
    }

    def __init__(self, piece_mb: int = 256, gradients: bool = False) -> None:
        super().__init__()
        check_number("OffloadOptimizer", "piece_mb", piece_mb, least=1, whole=True)
        self.piece_mb, self.gradients = piece_mb, gradients
        self._said = False

    def check(self, trainer: Any, module: Any) -> None:
        traits, device = traits_of(trainer.strategy), trainer.strategy.root_device.type
        reasons = {
            f"{type(module).__name__} optimizes manually": not module.automatic_optimization,
            "a gradient scaler looks for them there (bf16-mixed needs none)": (
                getattr(trainer.precision_plugin, "scaler", None) is not None
            ),
            f"{traits.name} averages or joins them there": traits.replicates or traits.flattens,
        }
        reason = next((reason for reason, holds in reasons.items() if holds and self.gradients), None)
        if reason is not None:
            raise ConflictError(f"OffloadOptimizer: gradients cannot leave the GPU, as {reason}: use gradients=False")
        if device == "cpu":
            raise ConfigurationError(
                "OffloadOptimizer: this trainer's device is 'cpu', where optimizer states are in CPU memory already: "
                "there is nothing to save. Use accelerator='gpu', or LowBitOptimizer to save CPU memory"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_sharded, parameters)):
            raise ConfigurationError("OffloadOptimizer: sharded parameters (DTensors) bring CPU offload of their own")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError("OffloadOptimizer: LBFGS keeps one state for all parameters, which has no pieces")
        stream_states(optimizer, self.piece_mb * 2**20, self.gradients, who="OffloadOptimizer")
        total = sum(p.numel() for p in parameters)
        return Report(
            f"{type(optimizer).__name__}: states {'and gradients ' * self.gradients}of {total:,} parameters in CPU "
            f"memory, those of {self.piece_mb} MB of parameters at a time on the device",
            parameters=total,
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning moves restored states to the device; take them back before the first activations."""
        for store in self._stores(trainer):
            for piece in store.all_pieces():
                store.put_back(piece)
            store.copies.finish()
        if self.gradients:
            wrap_method(pl_module, "backward", _backward)
            wrap_method(trainer.precision_plugin, "main_params", _main_params)
            if zeroes_by_hand(pl_module):
                wrap_method(pl_module, "optimizer_zero_grad", _zero_grad)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._allow_reads(trainer)
        unwrap_method(pl_module, "backward", _backward)
        unwrap_method(pl_module, "optimizer_zero_grad", _zero_grad)
        unwrap_method(trainer.precision_plugin, "main_params", _main_params)
        super().teardown(trainer, pl_module, stage)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Say once how much memory the states take: only the first step makes them."""
        self._allow_reads(trainer)
        stores = list(self._stores(trainer))
        if not self._said and all(store.held for store in stores):
            self._said = True
            held, states = (sum(sizes) for sizes in zip(*((store.held, store.state_bytes) for store in stores)))
            gradients = sum(store.gradients.bytes_held for store in stores if store.gradients is not None)
            rank_zero_info(
                f"OffloadOptimizer: {states / 2**20:.1f} MiB of states "
                f"{f'and {gradients / 2**20:.1f} MiB of gradients ' if self.gradients else ''}"
                f"in {held / 2**20:.1f} MiB of pinned CPU memory"
            )

    def _allow_reads(self, trainer: Any) -> None:
        for store in self._stores(trainer):
            store.allow_reads()

    def _stores(self, trainer: Any) -> Iterator[HostStates]:
        yield from (o.host_states for o in trainer.optimizers if isinstance(o, Streamed))


def _backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """The module's backward pass, whose gradients leave the device; then nobody may look for them there."""
    stores = [o.host_states for o in self.trainer.optimizers if isinstance(o, Streamed)]
    gradients = [store.gradients for store in stores if store.gradients is not None]
    with ExitStack() as leaving:
        for one in gradients:
            leaving.enter_context(one.leaving())
        inner_method(self, "backward", _backward)(loss, *args, **kwargs)
    names = {p: name for name, p in self.named_parameters()}
    for one in gradients if not accumulates(self.trainer) else ():
        one.reads.start(one.arrived(), names)


def _main_params(self: Any, optimizer: Any) -> Iterator[Tensor]:
    """What Lightning clips: in the place of parameters what has their gradients."""
    away = optimizer.host_states.gradients.arrived()
    return (away.get(p, p) for p in inner_method(self, "main_params", _main_params)(optimizer))


def _zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    """The module's own way, which may know of no gradients but those on the device."""
    gradients = [o.host_states.gradients for o in self.trainer.optimizers if isinstance(o, Streamed)]
    away = {p: stand for one in gradients if one is not None for p, stand in one.arrived().items()}
    kept = kept_by(lambda: inner_method(self, "optimizer_zero_grad", _zero_grad)(*args, **kwargs), away)
    for p in away.keys() - kept:
        away[p].grad = None

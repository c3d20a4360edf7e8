"""Offload optimizer: keep optimizer states in CPU memory, and copy them to the GPU and back in each step, in pieces.

    for each piece of the parameters:  states -> GPU,  step,  states -> CPU;  copies and steps run at the same time

Saves: the optimizer's states on the GPU, except for three pieces: 8 bytes for each parameter with AdamW. With
    ``gradients`` also the gradients on the GPU, except for one piece
Costs: twice the bytes of the states over the bus in each step (0.3 s for a billion parameters at 50 GB/s), and as much
    CPU memory as the states need. With ``gradients`` the same for the gradients
Source: Rajbhandari et al. (2021), https://arxiv.org/abs/2104.07857; there the CPU steps, here states are streamed

torchao's ``CPUOffloadOptimizer`` steps on the CPU. It has no ``state`` and no ``defaults``, hides the user's parameter
groups and forbids clipping. Streaming keeps torch's step on the GPU, for any optimizer class: numbers are identical,
and groups, schedulers, clipping and checkpoints are as without offloading.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number
from lit_efficient.internals.lightning_loops import accumulates, zeroes_by_hand
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.optimizers.host_states import HostStates, Streamed, stream_states
from lit_efficient.optimizers.later_reads import kept_by
from lit_efficient.surgery import is_sharded
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class OffloadOptimizer(OptimizerHooks, Technique):
    """Keep the states of the module's optimizer, of any class, in CPU memory.

    Args:
        piece_mb: Size in MB of the parameters whose states are on the GPU at the same time, at least 1. Larger pieces
            launch fewer kernels.
        gradients: Also keep gradients in CPU memory. Each gradient leaves the GPU as soon as the backward pass has
            computed it, and is clipped in CPU memory. Gradients of accumulated batches are added on the GPU, one at a
            time.

    Raises:
        ConfigurationError: For an argument out of range, without a GPU, for sharded parameters (DTensors), and if code
            reads a ``parameter.grad`` that is in CPU memory.
        ConflictError: With ``gradients``, for manual optimization, a gradient scaler (16-mixed), and strategies that
            keep gradients themselves (DDP) or join parameters.
    """

    phase = Phase.OPTIMIZER
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "BlockSwap(trained=True)": "it already keeps states in CPU memory; leave out OffloadOptimizer",
        "LowBitOptimizer": "both decide where states are stored; use LowBitOptimizer(paged=True), which does both",
        Trait.SCHEDULE_FREE: (
            "swapping the weights needs the optimizer's states on the device of the parameters; keep one of them"
        ),
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (9, "the optimizer's states, for transfers in each step")}

    def __init__(self, piece_mb: int = 256, gradients: bool = False) -> None:
        super().__init__()
        check_number("OffloadOptimizer", "piece_mb", piece_mb, least=1, whole=True)
        self.piece_mb = piece_mb
        self.gradients = gradients
        self._size_reported = False

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        reason = None
        if not module.automatic_optimization:
            reason = f"{type(module).__name__} uses manual optimization"
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            reason = "a gradient scaler reads them there (bf16-mixed needs none)"
        elif traits.replicates or traits.flattens:
            reason = f"{traits.name} averages or joins them there"
        if self.gradients and reason is not None:
            raise ConflictError(
                f"OffloadOptimizer: gradients cannot leave the GPU, because {reason}. Use gradients=False"
            )
        device = trainer.strategy.root_device
        planned = kind_of(device) != device.type  # a plan for a GPU
        if planned and self.gradients:
            raise ConfigurationError(
                "OffloadOptimizer: gradients=True cannot be planned without a GPU, because the plan would have to "
                "follow the gradients that leave the device. Plan on a machine with a GPU"
            )
        if device.type == "cpu" and not planned:
            raise ConfigurationError(
                "OffloadOptimizer: the trainer's device is 'cpu', so that optimizer states are already in CPU memory. "
                "Use accelerator='gpu', or LowBitOptimizer to save CPU memory"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_sharded, parameters)):
            raise ConfigurationError(
                "OffloadOptimizer: parameters are sharded (DTensors), and strategies that shard have a CPU offload of "
                "their own. Use that, or leave out OffloadOptimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "OffloadOptimizer: LBFGS keeps one state for all parameters, which cannot be split into pieces. Use "
                "another optimizer"
            )
        stream_states(optimizer, self.piece_mb * 2**20, self.gradients, who="OffloadOptimizer")
        total = sum(p.numel() for p in parameters)
        what = "states and gradients" if self.gradients else "states"
        return Report(
            f"{type(optimizer).__name__}: {what} of {total:,} parameters in CPU memory, those of {self.piece_mb} MB of "
            "parameters at a time on the device",
            parameters=total,
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move restored states back to CPU memory before the first activations: Lightning puts them on the device."""
        for store in self._stores(trainer):
            for piece in store.all_pieces():
                store.put_back(piece)
            store.copies.finish()
        if self.gradients:
            # Lightning and the module would otherwise look for gradients in ``p.grad``.
            wrap_method(pl_module, "backward", _backward)
            wrap_method(trainer.precision_plugin, "main_params", _main_params)
            if zeroes_by_hand(pl_module):
                wrap_method(pl_module, "optimizer_zero_grad", _zero_grad)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._allow_reads(trainer)
        unwrap_method(pl_module, "backward", _backward)
        unwrap_method(pl_module, "optimizer_zero_grad", _zero_grad)
        unwrap_method(trainer.precision_plugin, "main_params", _main_params)
        super().teardown(trainer, pl_module, stage)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """After the first step, which creates the states, report how much memory they need."""
        self._allow_reads(trainer)
        stores = list(self._stores(trainer))
        if not self._size_reported and all(store.held for store in stores):
            self._size_reported = True
            held = sum(store.held for store in stores)
            content = f"{sum(store.state_bytes for store in stores) / 2**20:.1f} MiB of states"
            if self.gradients:
                gradients = sum(store.gradients.bytes_held for store in stores if store.gradients is not None)
                content += f" and {gradients / 2**20:.1f} MiB of gradients"
            rank_zero_info(f"OffloadOptimizer: {content} in {held / 2**20:.1f} MiB of pinned CPU memory")

    def _allow_reads(self, trainer: Trainer) -> None:
        for store in self._stores(trainer):
            store.allow_reads()

    def _stores(self, trainer: Trainer) -> Iterator[HostStates]:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Streamed):
                yield optimizer.host_states


def _backward(self: Any, loss: Tensor, *args: object, **kwargs: object) -> None:
    """Run the module's backward pass and move gradients to CPU memory. Reading ``parameter.grad`` is then refused."""
    stores = [o.host_states for o in self.trainer.optimizers if isinstance(o, Streamed)]
    gradients = [store.gradients for store in stores if store.gradients is not None]
    with ExitStack() as leaving:
        for one in gradients:
            leaving.enter_context(one.leaving())
        inner_method(self, "backward", _backward)(loss, *args, **kwargs)
    if accumulates(self.trainer):  # the next batch's gradients will be added
        return
    names = {p: name for name, p in self.named_parameters()}
    for one in gradients:
        one.reads.start(one.arrived(), names)


def _main_params(self: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Return the tensors whose gradients Lightning clips: for each parameter the tensor that holds its gradient."""
    away = optimizer.host_states.gradients.arrived()
    return (away.get(p, p) for p in inner_method(self, "main_params", _main_params)(optimizer))


def _zero_grad(self: LightningModule, *args: object, **kwargs: object) -> None:
    """Run the module's own ``optimizer_zero_grad``, and then remove the gradients in CPU memory that it removed."""
    gradients = [o.host_states.gradients for o in self.trainer.optimizers if isinstance(o, Streamed)]
    away: dict[Tensor, Tensor] = {}  # parameter -> tensor in CPU memory that holds its gradient
    for one in gradients:
        if one is not None:
            away |= one.arrived()
    kept = kept_by(lambda: inner_method(self, "optimizer_zero_grad", _zero_grad)(*args, **kwargs), away)
    for p in away.keys() - kept:
        away[p].grad = None

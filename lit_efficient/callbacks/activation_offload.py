"""Activation offloading: the tensors that blocks save for the backward pass are moved to CPU memory.

    forward of block l + 1  |  copy out the tensors of l;    backward of block l  |  copy in the tensors of l - 1

Saves: the blocks' activations on the device, except those of two blocks
Costs: two transfers of these bytes, which overlap with the computation; as much pinned CPU memory, rounded up to powers
    of two
Source: PyTorch's save_on_cpu, and torchtune's OffloadActivations, https://github.com/meta-pytorch/torchtune

Gradients equal those of the plain network bit by bit. With ``ActivationCheckpointing`` the inputs of recomputed blocks
are offloaded. Results that its ``save`` keeps within a block stay on the device.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import check_number
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.offloading import Offload
from lit_efficient.mechanisms.blocks.side_copies import check_separate_memory
from lit_efficient.surgery import class_names, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _Offloaded(nn.Module):
    """Mix-in of a block. It acts around ``__call__``, so that compiled code, sharding and hooks are inside."""

    _offload: Offload

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():  # the block is part of a larger graph, which saves the tensors by itself
            return super().__call__(*args, **kwargs)
        with self._offload.call(self.parameters):
            return super().__call__(*args, **kwargs)


class ActivationOffload(Technique):
    """Keep the tensors that repeated blocks save for the backward pass in CPU memory, and prefetch them.

    Evaluation and sampling do not change, because they record no gradient. Checkpoints do not change either. Tensors
    that are saved outside the blocks stay on the device, and so do those of the last block, whose backward pass comes
    first.

    Args:
        min_bytes: Size of the smallest tensors that are offloaded, in bytes, at least 1. Each copy costs some
            microseconds.
        blocks: ``auto`` finds the repeated blocks, in a UNet the residual and attention blocks of each level. Otherwise
            regular expressions for dotted names.

    Raises:
        ConfigurationError: For a device that uses CPU memory, an argument out of range, or if there are no such blocks.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    conflicts = {
        "Compile(modules='network')": "a graph of the whole network saves its tensors by itself: use modules='blocks'"
    }
    computes = "same"
    helps = {"memory": (8, "activations of the blocks, for transfers during the computation")}

    def __init__(self, min_bytes: int = 2**20, blocks: str | list[str] = "auto") -> None:
        super().__init__()
        check_number("ActivationOffload", "min_bytes", min_bytes, least=1, whole=True)
        self.min_bytes = min_bytes
        self.blocks = blocks
        self._reported = False

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if kind_of(device) == device.type:  # not a plan for a GPU
            check_separate_memory(device, "ActivationOffload", "ActivationCheckpointing")

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="ActivationOffload", declared=False)
        offload = Offload(self.min_bytes)
        for _, block in found:
            mix_in(block, _Offloaded, _offload=offload)
        kinds = class_names(block for _, block in found)
        return Report(
            f"{len(found)} blocks ({kinds}) keep saved tensors of {format_bytes(self.min_bytes)} or more in CPU memory",
            modules=tuple(name for name, _ in found),
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._reported:
            _offload_of(pl_module).reset()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the amount that was offloaded in the first batch in which the blocks saved tensors."""
        offload = _offload_of(pl_module)
        # Trial steps, which set ``worst_case``, are not the first batch.
        if self._reported or self.worst_case or not offload.largest:
            return
        self._reported = True
        if offload.tensors:
            rank_zero_info(
                f"ActivationOffload: {format_bytes(offload.bytes)} in {offload.tensors} tensors were moved to CPU "
                "memory in the first batch"
            )
        else:
            rank_zero_warn(
                "ActivationOffload: nothing was moved to CPU memory in the first batch: the largest tensor that the "
                f"blocks saved has {offload.largest} bytes, and min_bytes is {self.min_bytes}. Lower min_bytes"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._reported:
            rank_zero_info(
                "ActivationOffload: nothing was moved to CPU memory: the blocks saved no tensors for a backward pass"
            )


def _offload_of(root: nn.Module) -> Offload:
    return next(part._offload for part in root.modules() if isinstance(part, _Offloaded))

"""Activation offloading: the tensors that blocks save for the backward pass are moved to CPU memory.

    forward of block l + 1  |  copy out the tensors of l;    backward of block l  |  copy in the tensors of l - 1
    flops_per_byte          |  only blocks with bytes * flops_per_byte <= FLOPs of the blocks until the next copy

Saves: the blocks' activations on the device, except those of two blocks; of fewer blocks with `flops_per_byte`
Costs: two transfers of these bytes, which overlap with the computation; as much pinned CPU memory, rounded up to powers
    of two
Source: PyTorch's save_on_cpu, and torchtune's OffloadActivations, https://github.com/meta-pytorch/torchtune

Gradients equal those of the plain network bit by bit. With ``ActivationCheckpointing`` the inputs of recomputed blocks
are offloaded. Results that its ``save`` keeps within a block stay on the device. With ``flops_per_byte`` a block is
either offloaded or recomputed.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.declaration import Phase, Report, format_bytes, techniques_of
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.offloading import Offload, choose_hidden
from lit_efficient.mechanisms.blocks.side_copies import check_separate_memory
from lit_efficient.mechanisms.flops import FlopMeter
from lit_efficient.surgery import class_names, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _Offloaded(nn.Module):
    """Mix-in of a block. It acts around ``__call__``, so that compiled code, sharding and hooks are inside."""

    _offload: Offload
    _offloads: bool  # whether the saved tensors of this block are moved
    _frees: bool  # whether the copies of an earlier block are complete after this block
    _counts: bool  # whether the next forward is counted
    _counted: tuple[int, int] | None  # FLOPs and saved bytes of a forward
    _spared: bool  # the block recomputes unless it is offloaded

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():  # the block is part of a larger graph, which saves the tensors by itself
            return super().__call__(*args, **kwargs)
        if self._counts and torch.is_grad_enabled():
            before = self._offload.bytes
            with FlopMeter() as meter, self._offload.call(self.parameters):
                output = super().__call__(*args, **kwargs)
            self._counted = (meter.sums.total(), self._offload.bytes - before)
            return output
        if self._offloads:
            with self._offload.call(self.parameters):
                return super().__call__(*args, **kwargs)
        output = super().__call__(*args, **kwargs)
        if self._frees and torch.is_grad_enabled():
            self._offload.passed(output)
        return output


class ActivationOffload(Technique):
    """Keep the tensors that repeated blocks save for the backward pass in CPU memory, and prefetch them.

    Evaluation and sampling do not change, because they record no gradient. Checkpoints do not change either. Tensors
    that are saved outside the blocks stay on the device, and so do those of the last block, whose backward pass comes
    first.

    With ``flops_per_byte`` the first batch offloads all blocks and counts the operations and the bytes of each. From
    the second batch on only those blocks are offloaded whose copies are hidden behind the computation. The other blocks
    keep their tensors on the device, or recompute them if ``ActivationCheckpointing`` is used.

    Args:
        min_bytes: Size of the smallest tensors that are offloaded, in bytes, at least 1. Each copy costs some
            microseconds.
        blocks: ``auto`` finds the repeated blocks, in a UNet the residual and attention blocks of each level. Otherwise
            regular expressions for dotted names.
        flops_per_byte: Operations that the device computes while the bus moves one byte to the CPU: its sustained rate
            divided by the rate of the bus, such as 400e12 / 50e9 = 8000 for an H200 in 16 bits. None offloads all
            blocks, which takes longer than the computation if blocks save much for few operations.

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

    def __init__(
        self, min_bytes: int = 2**20, blocks: str | list[str] = "auto", flops_per_byte: float | None = None
    ) -> None:
        super().__init__()
        check_number("ActivationOffload", "flops_per_byte", flops_per_byte, above=0, null=True)
        check_number("ActivationOffload", "min_bytes", min_bytes, least=1, whole=True)
        self.min_bytes = min_bytes
        self.blocks = blocks
        self.flops_per_byte = flops_per_byte
        self._reported = False
        self._recomputed: list[Any] = []  # blocks that recompute unless they are offloaded

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if kind_of(device) == device.type:  # not a plan for a GPU
            check_separate_memory(device, "ActivationOffload", "ActivationCheckpointing")

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="ActivationOffload", declared=False)
        offload = Offload(self.min_bytes)
        for _, block in found:
            flags = {"_offloads": True, "_frees": False, "_counts": False, "_spared": False}
            mix_in(block, _Offloaded, _offload=offload, _counted=None, **flags)
        kinds = class_names(block for _, block in found)
        summary = f"{len(found)} blocks ({kinds}) keep saved tensors of {format_bytes(self.min_bytes)} or more in CPU"
        summary += " memory"
        if self.flops_per_byte is not None:
            summary += f" or fewer: the first batch decides, with {self.flops_per_byte:g} operations per copied byte"
        return Report(summary, modules=tuple(name for name, _ in found))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self.flops_per_byte is None:
            return
        if any(getattr(technique, "memory_budget", None) is not None for technique in techniques_of(trainer)):
            raise ConfigurationError(
                "ActivationOffload: flops_per_byte and memory_budget of ActivationCheckpointing both choose the blocks "
                "that are recomputed: leave one of them out"
            )
        blocks: list[Any] = list(_blocks(pl_module).values())
        # An earlier fit may have ended while its blocks were counted.
        self._recomputed = [block for block in blocks if block._spared or getattr(block, "_recomputes", False)]
        for block in blocks:
            block._counts = True
            block._offloads = True
            block._frees = False
        for block in self._recomputed:  # until it is known which are offloaded
            block._recomputes = False
            block._spared = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._reported:
            _offload_of(pl_module).reset()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the amount that was offloaded in the first batch in which the blocks saved tensors."""
        offload = _offload_of(pl_module)
        self._choose(trainer, pl_module)
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

    def _choose(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the blocks that are offloaded, once the forward of the blocks has been counted."""
        blocks = _blocks(pl_module)
        if self.flops_per_byte is None or not any(block._counts and block._counted for block in blocks.values()):
            return
        # Ranks may count different sizes, but must choose the same blocks.
        counted = trainer.strategy.broadcast([block._counted or (0, 0) for block in blocks.values()])
        flops = [one for one, _ in counted]
        sizes = [size for _, size in counted]
        chosen, frees = choose_hidden(flops, sizes, self.flops_per_byte)
        for block, offloads, free in zip(blocks.values(), chosen, frees, strict=True):
            block._counts = False
            block._offloads = offloads
            block._frees = free
        for block in self._recomputed:
            block._recomputes = not block._offloads
        rest = "recompute their" if self._recomputed else "keep their"
        moved = sum(size for size, goes in zip(sizes, chosen, strict=True) if goes)
        rank_zero_info(
            f"ActivationOffload: {sum(chosen)} of {len(blocks)} blocks are offloaded, {format_bytes(moved)} of "
            f"{format_bytes(sum(sizes))}: a block computes {max(flops):.3g} operations and saves "
            f"{format_bytes(max(sizes))}. The others {rest} activations"
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._reported:
            rank_zero_info(
                "ActivationOffload: nothing was moved to CPU memory: the blocks saved no tensors for a backward pass"
            )


def _blocks(root: nn.Module) -> dict[str, _Offloaded]:
    return {name: part for name, part in root.named_modules() if isinstance(part, _Offloaded)}


def _offload_of(root: nn.Module) -> Offload:
    return next(block._offload for block in _blocks(root).values())

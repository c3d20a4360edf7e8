"""Activation offloading: what a block keeps for its backward pass waits in CPU memory.

    forward of block l + 1  |  copy out what l has saved;    backward of block l  |  copy in what l - 1 has saved

Saves: the blocks' activations on the device, all but those of two blocks
Costs: twice their bytes over the bus, beside the computation; as much pinned CPU memory, rounded up to powers of two
Source: PyTorch's save_on_cpu, and torchtune's OffloadActivations, https://github.com/meta-pytorch/torchtune

Gradients are those of the plain network bit by bit. Beside ``ActivationCheckpointing`` the inputs of recomputed blocks
are offloaded, which is all that they keep; what its ``save`` keeps within a block stays on the device.
"""

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.offloading import Offload
from lit_efficient.mechanisms.trials.memory import format_bytes
from lit_efficient.surgery import mix_in, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _Offloaded(nn.Module):
    """Mix-in of a block. It acts around the call, so that what is compiled, sharded or hooked lies within."""

    _offload: Offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of something larger, which saves its tensors by itself
            return super().__call__(*args, **kwargs)
        with self._offload.call(self.parameters):
            return super().__call__(*args, **kwargs)


class ActivationOffload(Technique):
    """Keep what repeated blocks save for the backward pass in CPU memory, and bring it back ahead of its use.

    Where no gradient is recorded, in evaluation and sampling, nothing changes; checkpoints are as without it. What is
    outside of the blocks stays on the device, and so does what the last block has saved: it is needed first.

    Args:
        min_bytes: Smaller tensors stay on the device, at least 1: each copy costs some microseconds.
        blocks: ``auto`` finds repeated blocks, in a UNet the residual and attention blocks of each level; otherwise
            regular expressions for dotted names.

    Raises:
        ConfigurationError: For a device whose memory is the CPU's, for an argument out of range, without such blocks.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "Compile(modules='network')": "what is compiled as a whole saves its tensors by itself: use modules='blocks'"
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (8, "activations of the blocks, for transfers beside the computation")
    }

    def __init__(self, min_bytes: int = 2**20, blocks: str | list[str] = "auto") -> None:
        super().__init__()
        check_number("ActivationOffload", "min_bytes", min_bytes, least=1, whole=True)
        self.min_bytes = min_bytes
        self.blocks = blocks
        self._said = False

    def check(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device.type
        if device in ("cpu", "mps"):
            raise ConfigurationError(
                f"ActivationOffload: this trainer's device is {device!r}, whose memory is the CPU's: there is nothing "
                "to save. Use accelerator='gpu', or ActivationCheckpointing, which saves memory on any device"
            )

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who=type(self).__name__, declared=False)
        offload = Offload(self.min_bytes)
        for _, block in found:
            mix_in(block, _Offloaded, _offload=offload)
        kinds = ", ".join(sorted({unmixed(block).__name__ for _, block in found}))
        return Report(
            f"{len(found)} blocks ({kinds}) keep saved tensors from {format_bytes(self.min_bytes)} on in CPU memory",
            modules=tuple(name for name, _ in found),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self._said:
            _offload_of(pl_module).reset()

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say what the first batch has come to in which the blocks saved something."""
        offload = _offload_of(pl_module)
        if self._said or self.worst_case or not offload.largest:
            return
        self._said = True
        if offload.tensors:
            rank_zero_info(
                f"ActivationOffload: {format_bytes(offload.bytes)} in {offload.tensors} tensors went to CPU memory in "
                "the first batch"
            )
        else:
            rank_zero_warn(
                "ActivationOffload: nothing went to CPU memory in the first batch: the largest tensor that the blocks "
                f"saved has {offload.largest} bytes, and min_bytes is {self.min_bytes}"
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if not self._said:
            rank_zero_info(
                "ActivationOffload: nothing went to CPU memory: the blocks saved nothing for a backward pass"
            )


def _offload_of(root: nn.Module) -> Offload:
    return next(part._offload for part in root.modules() if isinstance(part, _Offloaded))

"""Cache emptying: every few steps the device's allocator gives back memory that no tensor is in.

    memory of the process = tensors + cached blocks;    afterwards: tensors + what shares a segment with one

Saves: what is cached and fits no request, where batches differ in shape; memory for other processes on the device
Costs: the device finishes all work first, and the next step asks the driver for its memory again
Source: Hugging Face's torch_empty_cache_steps; https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from lightning.pytorch import LightningModule, Trainer
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.mechanisms.trials.memory import format_bytes


class EmptyCache(Callback):
    """Empty the cache of the accelerator's allocator every so many optimizer steps; the end of a fit says what it gave.

    Try ``PYTORCH_ALLOC_CONF=expandable_segments:True`` first: it avoids most fragments at no cost.

    Args:
        every_n_steps: Optimizer steps from one time to the next, at least 1.

    Raises:
        ConfigurationError: On the CPU, which has no such cache, and for an argument out of range.
    """

    helps = {"memory": (0, "cached blocks that fit no request, for waiting")}

    def __init__(self, every_n_steps: int = 100) -> None:
        super().__init__()
        check_number("EmptyCache", "every_n_steps", every_n_steps, least=1, whole=True)
        self.every_n_steps = every_n_steps
        self._step = self._times = self._largest = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type == "cpu":
            raise ConfigurationError(
                "EmptyCache: this trainer's device is 'cpu', whose allocator keeps no cache: leave it out, or use "
                "accelerator='gpu'"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step, self._times, self._largest = trainer.global_step, 0, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if not stepped or self._step % self.every_n_steps:
            return
        device = trainer.strategy.root_device
        before = torch.accelerator.memory_reserved(device)
        torch.accelerator.empty_cache()
        self._times += 1
        self._largest = max(self._largest, before - torch.accelerator.memory_reserved(device))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank_zero_info(
            f"EmptyCache: emptied {self._times} times, {format_bytes(self._largest)} at most"
            + ("" if self._largest else ": it gave nothing back, and costs time")
        )

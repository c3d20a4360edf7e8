"""Cache emptying: every few steps the device's allocator returns memory that no tensor uses.

    memory of the process = tensors + cached blocks;    afterwards: tensors + unused parts of their segments

Saves: cached blocks that fit no request, if batches differ in shape; memory for other processes on the device
Costs: the device finishes all work first, and the next step requests its memory from the driver again
Source: Hugging Face's torch_empty_cache_steps; https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.declaration import format_bytes
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number
from lit_efficient.internals.lightning_trainer import TrainerOnly


class EmptyCache(Callback, ChecksTypes, TrainerOnly):
    """Empty the cache of the accelerator's allocator every few optimizer steps, and log the memory that this returned.

    Try ``PYTORCH_ALLOC_CONF=expandable_segments:True`` first: it avoids most fragmentation at no cost.

    Args:
        every_n_steps: Number of optimizer steps between two times, at least 1.

    Raises:
        ConfigurationError: On the CPU, which has no such cache, and for an argument out of range.
    """

    helps = {"memory": (0, "cached blocks that fit no request, for waiting")}

    def __init__(self, every_n_steps: int = 100) -> None:
        super().__init__()
        check_number("EmptyCache", "every_n_steps", every_n_steps, least=1, whole=True)
        self.every_n_steps = every_n_steps
        self._first = 0  # steps before this fit
        self._step = 0
        self._times = 0
        self._largest = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type == "cpu":
            raise ConfigurationError(
                "EmptyCache: this trainer's device is 'cpu', whose allocator keeps no cache: leave EmptyCache out, or "
                "use accelerator='gpu'"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = trainer.global_step
        self._step = trainer.global_step
        self._times = 0
        self._largest = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._step % self.every_n_steps:
            return
            return
        device = trainer.strategy.root_device
        before = torch.accelerator.memory_reserved(device)
        torch.accelerator.empty_cache()
        self._times += 1
        self._largest = max(self._largest, before - torch.accelerator.memory_reserved(device))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        summary = f"EmptyCache: emptied {self._times} times, {format_bytes(self._largest)} at most"
        if not self._times:
            steps = trainer.global_step - self._first
            summary = f"EmptyCache: never emptied, because none of {steps} steps was a multiple of {self.every_n_steps}"
        elif not self._largest:
            summary += ": it returned no memory, and takes time; leave it out"
        rank_zero_info(summary)

"""Base classes for strategies that shard: Lightning's ModelParallelStrategy and DeepSpeedStrategy, extended.

They use private attributes: the sizes of the mesh, ``_save_distributed_checkpoint``, ``_forward_redirection``,
``_init_optimizers``, ``_setup_model_and_optimizer``, and ``_restore_from_bit16_weights`` of DeepSpeed 0.19.8.
Checked with lightning 2.6.6.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.optim import Optimizer

from lit_efficient.internals.wraps import does_nothing, inner_method


class ShardingBase(ModelParallelStrategy):
    """ModelParallelStrategy whose data-parallel size is derived from the number of processes."""

    @property
    def in_shards(self) -> bool:
        """True if each process writes its own shards into the checkpoint, which is a folder."""
        return bool(self._save_distributed_checkpoint)

    def fix_sizes(self, tensor_parallel: int) -> None:
        """Set the sizes of the mesh before the processes have connected: all other processes are data-parallel."""
        self._tensor_parallel_size = tensor_parallel
        self._data_parallel_size = self.num_nodes * self.num_processes // tensor_parallel

    def run_as_forward(self, module: LightningModule, name: str, *args: object, **kwargs: object) -> object:
        """Call a method of ``module`` inside the hooks of its forward pass, which gather parameters."""
        had_own = "forward" in module.__dict__
        try:
            return self._forward_redirection(module, module, name, *args, **kwargs)
        finally:
            if not had_own:
                module.__dict__.pop("forward", None)  # the redirection leaves a function that cannot be pickled


class ZeroBase(DeepSpeedStrategy):
    """DeepSpeedStrategy that can check the optimizer, and whose checkpoints cover the parameters that it steps.

    DeepSpeed uses ``requires_grad`` to select the parameters of a checkpoint. Techniques may change it after the
    optimizer was created.
    """

    _stepped: Container[int] = ()  # ids of the parameters that the engine steps

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise an error if DeepSpeed cannot use the optimizer. The default accepts all."""

    def _init_optimizers(self) -> Any:
        found = super()._init_optimizers()
        self.check_optimizer(found[0])
        return found

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        self._stepped = {id(p) for p in model.parameters() if p.requires_grad}
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        with _requiring(self.lightning_module, lambda p: id(p) in self._stepped):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint. Outside of a fit, all weights are loaded, and the optimizer has no copies of them."""
        module: Any = self.lightning_module
        if module.trainer.state.fn == "fit":
            return super().load_checkpoint(checkpoint_path, weights_only)
        optimizer = self.deepspeed_engine.optimizer
        if optimizer is not None:
            optimizer._restore_from_bit16_weights = does_nothing
        with _requiring(module, torch.is_floating_point):
            return super().load_checkpoint(checkpoint_path, weights_only)


@contextmanager
def _requiring(module: Any, wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Context in which exactly the parameters for which ``wanted`` is true require a gradient."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    for p, _ in before:
        p.requires_grad_(wanted(p))
    try:
        yield
    finally:
        for p, required in before:
            p.requires_grad_(required)


def configure_model(self: LightningModule) -> None:
    """Wrap of ``configure_model`` that makes Lightning believe it is overridden, as it requires for this strategy."""
    inner_method(self, "configure_model", configure_model)()

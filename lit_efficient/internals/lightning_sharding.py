"""Lightning's ModelParallelStrategy with sizes by the world's and steps that are forward passes; DeepSpeedStrategy.

By private attributes: its sizes, ``_save_distributed_checkpoint`` and ``_forward_redirection``; ``_init_optimizers``,
``_setup_model_and_optimizer``, and what DeepSpeed 0.19.8 calls ``_restore_from_bit16_weights``.
Checked with lightning 2.6.6.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from lit_efficient.internals.wraps import does_nothing, inner_method


class ShardingBase(ModelParallelStrategy):
    """All processes share each parameter, but for those that tensor parallelism takes."""

    @property
    def in_shards(self) -> bool:
        """Whether each process writes what it holds, into one folder."""
        return bool(self._save_distributed_checkpoint)

    def fix_sizes(self, tensor_parallel: int) -> None:
        """Say, before processes know each other, how many of them hold one copy's shards: the rest of the world."""
        self._tensor_parallel_size = tensor_parallel
        self._data_parallel_size = self.num_nodes * self.num_processes // tensor_parallel

    def run_as_forward(self, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of ``module`` within the hooks of its forward pass."""
        had_own = "forward" in module.__dict__
        try:
            return self._forward_redirection(module, module, name, *args, **kwargs)
        finally:
            if not had_own:
                module.__dict__.pop("forward", None)  # what it puts there cannot be pickled


class ZeroBase(DeepSpeedStrategy):
    """Lets a subclass look at the optimizer before DeepSpeed takes it; its checkpoints go by what the engine steps.

    DeepSpeed asks ``requires_grad`` for that, which a fit that has ended may have thawed, and others freeze.
    """

    _stepped: Container[int] = ()  # parameters, by identity

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse it, or nothing."""

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
        """Outside of a fit all weights are read whole, and there is no optimizer that has copies of them."""
        module: Any = self.lightning_module
        if module.trainer.state.fn == "fit":
            return super().load_checkpoint(checkpoint_path, weights_only)
        if (engine := self.deepspeed_engine).optimizer is not None:
            engine.optimizer._restore_from_bit16_weights = does_nothing
        with _requiring(module, torch.is_floating_point):
            return super().load_checkpoint(checkpoint_path, weights_only)


@contextmanager
def _requiring(module: Any, wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Have those parameters require a gradient that are ``wanted``, and no others."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    for p, _ in before:
        p.requires_grad_(wanted(p))
    try:
        yield
    finally:
        for p, required in before:
            p.requires_grad_(required)


def configure_model(self: Any) -> None:
    """Have Lightning see one of the module's own, which it asks for because users shard there."""
    inner_method(self, "configure_model", configure_model)()

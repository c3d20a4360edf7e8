"""Clip gradients right before the step, after all that checks, measures or scales them; wherever they lie by then."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.metering import gradients_of
from lit_efficient.technique import Technique

_CLIPPING = "LightningModule.configure_gradient_clipping"


class ClipsGradients(Technique):
    """Base of techniques that clip: once an optimizer step, each optimizer's gradients, on manual optimization, too."""

    def clip(self, gradients: dict[Tensor, Tensor]) -> None:
        """Change the gradients of one optimizer in place; of one parameter, where it steps in the backward pass."""
        raise NotImplementedError

    def check(self, trainer: Any, module: Any) -> None:
        who = type(self).__name__
        unwrap_method(module, "configure_gradient_clipping", _configure_gradient_clipping)  # of a copy of a running one
        if trainer.gradient_clip_val:
            raise ConflictError(
                f"{who}: Trainer(gradient_clip_val={trainer.gradient_clip_val:g}) clips, too, so that neither limit "
                f"would be what it says: set gradient_clip_val to null, or leave {who} out"
            )
        if getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING:
            raise ConflictError(
                f"{who}: {type(module).__name__} clips in its own configure_gradient_clipping: leave one of them out"
            )
        traits = traits_of(trainer.strategy)
        if traits.flattens:
            raise ConflictError(
                f"{who}: {traits.name} steps other tensors than the module's parameters, whose gradients are nowhere "
                "whole: use gradient_clip_val, or strategy='ddp' or ModelParallelStrategy"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stand where the trainer clips.

        Raises:
            ConfigurationError: If an optimizer steps with scaled gradients.
        """
        who = type(self).__name__
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "in_backward"):
                optimizer.in_backward.watchers.append(self._clip_one)
            if getattr(trainer.precision_plugin, "scaler", None) is not None and unscales(optimizer):
                raise ConfigurationError(
                    f"{who}: {type(optimizer).__name__} is fused and takes gradients that are still scaled: use "
                    "fused=False or precision='bf16-mixed'"
                )
        if pl_module.automatic_optimization:
            wrap_method(pl_module, "configure_gradient_clipping", _configure_gradient_clipping)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if not pl_module.automatic_optimization:  # the trainer clips nothing then
            self._clip_all(optimizer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap_method(pl_module, "configure_gradient_clipping", _configure_gradient_clipping)
        super().teardown(trainer, pl_module, stage)

    def _clip_all(self, optimizer: Optimizer) -> None:
        if not hasattr(optimizer, "in_backward") and (gradients := gradients_of(optimizer)):
            self.clip({parameter: _summed(parameter, gradient) for parameter, gradient in gradients.items()})

    def _clip_one(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.clip({parameter: _summed(parameter, parameter.grad)})


def _summed(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient; of a sparse one, whose rows may be there several times, what the optimizer then finds, too."""
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
    return gradient


def _configure_gradient_clipping(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Around the module's own, which does nothing without ``gradient_clip_val``."""
    inner_method(self, "configure_gradient_clipping", _configure_gradient_clipping)(optimizer, *args, **kwargs)
    for technique in self.trainer.callbacks:
        if isinstance(technique, ClipsGradients):
            technique._clip_all(optimizer)

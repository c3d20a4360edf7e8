"""Gradient hooks: changes to the gradients between the backward pass and the optimizer's step.

Order in each optimizer step, whatever the order of ``Trainer(callbacks=...)``:

1. The backward pass ends, with accumulation and averaging over processes; a gradient scaler has unscaled.
2. All callbacks' and the module's ``on_before_optimizer_step`` run, for example `NonFiniteGuard`.
3. Techniques with :class:`GradientHooks` act in the order of their phases: GUARD, GRADIENT, CLIP.
4. Lightning applies ``Trainer(gradient_clip_val=...)`` or the module's ``configure_gradient_clipping``: after all
   changes, so that its limit holds for what the optimizer gets. With manual optimization Lightning does not clip. If
   nothing acts in 3 and the module has no hook of its own, `NonFiniteGuard` reads the norm that is computed here.
5. The optimizer steps.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Hooks, Phase, Wrap, in_order, techniques_of
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.internals.wraps import inner_method
from lit_efficient.traits import Trait

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradientHooks(Hooks):
    """Mix-in for techniques that change gradients before a step: ``class Noise(GradientHooks, Technique)``."""

    phase = Phase.GRADIENT

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        """Change the gradients of one optimizer in place, once in each of its steps.

        Args:
            gradients: Parameters and their complete gradients, of the same shapes. Shards are DTensors, and sparse
                gradients are coalesced. An optimizer that steps in the backward pass gives one parameter at a time.
            optimizer: The optimizer that steps next.
            module: The LightningModule; ``module.trainer`` is the trainer.
        """
        raise NotImplementedError

    @classmethod
    def check_all(cls, trainer: "Trainer", module: "LightningModule", techniques: Sequence[Any]) -> None:
        """Refuse strategies under which no process has whole gradients."""
        traits = traits_of(trainer.strategy)
        if traits.flattens:
            instead = ""
            if Trait.CLIPS in techniques[0].traits:
                instead = "gradient_clip_val, or "
            raise ConflictError(
                f"{type(techniques[0]).__name__}: {traits.name} steps other tensors than the module's parameters, "
                f"whose gradients are nowhere whole: use {instead}strategy='ddp' or ModelParallelStrategy"
            )

    @classmethod
    def wraps(cls, trainer: "Trainer", module: "LightningModule", techniques: Sequence[object]) -> list[Wrap]:
        """Act after the module's own hook, which Lightning calls with manual optimization, too."""
        return [("on_train_start", _on_train_start), ("on_before_optimizer_step", _on_before_optimizer_step)]


def gradients_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradient of each parameter that has one; in CPU memory if the optimizer has moved it there."""
    on_host = getattr(getattr(optimizer, "host_states", None), "gradients", None)
    moved = {} if on_host is None else on_host.arrived()
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            gradient = moved.get(p, p).grad
            if gradient is not None:
                found[p] = gradient
    return found


def _on_before_optimizer_step(self: "LightningModule", optimizer: Optimizer) -> None:
    inner_method(self, "on_before_optimizer_step", _on_before_optimizer_step)(optimizer)
    if hasattr(optimizer, "in_backward"):  # whose gradients were changed one by one, and are gone
        return
    change_gradients(_techniques(self), optimizer, self)


def change_gradients(techniques: Iterable[GradientHooks], optimizer: Optimizer, module: nn.Module) -> None:
    """Let each technique change the gradients of an optimizer that is about to step."""
    for technique in techniques:
        gradients = gradients_of(optimizer)  # again for each one: the technique before may have dropped them
        technique.change_gradients(_coalesced(gradients), optimizer, module)


def _on_train_start(self: "LightningModule") -> None:
    """Refuse scaled gradients, and act on each gradient where the optimizer steps in the backward pass."""
    inner_method(self, "on_train_start", _on_train_start)()
    for optimizer in self.trainer.optimizers:
        if hasattr(optimizer, "in_backward"):
            optimizer.in_backward.watchers.append(partial(_change_one, self, optimizer))
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None and unscales(optimizer):
            _check_scaled(_techniques(self), optimizer)


def _check_scaled(techniques: Sequence[GradientHooks], optimizer: Optimizer) -> None:
    for technique in techniques:
        if Trait.READS_SCALED_GRADIENTS not in technique.traits:
            raise ConfigurationError(
                f"{type(technique).__name__}: {type(optimizer).__name__} is fused and takes gradients that are still "
                "scaled: use fused=False or precision='bf16-mixed'"
            )


def _change_one(module: nn.Module, optimizer: Optimizer, parameter: Tensor) -> None:
    for technique in _techniques(module):
        if parameter.grad is not None:
            technique.change_gradients(_coalesced({parameter: parameter.grad}), optimizer, module)


def _techniques(module: nn.Module) -> list[GradientHooks]:
    return [technique for technique in in_order(techniques_of(module.trainer)) if isinstance(technique, GradientHooks)]


def _coalesced(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return the gradients. A sparse one may hold a row several times: it is replaced by its sum, for the step, too."""
    for parameter, gradient in gradients.items():
        if gradient.is_sparse:
            parameter.grad = gradients[parameter] = gradient.coalesce()
    return gradients

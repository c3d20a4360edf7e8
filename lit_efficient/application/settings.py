"""Settings that do not hold in a run: options of optimizers, ``gradient_clip_val``, and validations that never come.

A module may set its own rates, weight decay or accumulation in ``optimizer_step``, and a callback may do so in any
hook, also between the backward pass and the step. What a technique has reported as set is therefore read from the
optimizer right after its step, before a scheduler sets the next values (:class:`ReadBack`).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_efficient.declaration import parts_of, traits_of_part
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import has_validation_data
from lit_efficient.internals.torch_shards import is_sharded
from lit_efficient.traits import Trait

STEPS = 2  # the second one, because a module may change a setting after its own ``optimizer.step()``
TOLERANCE = 1.01  # factor on a limit of gradients, because 16-bit gradients are rounded after they are clipped
_CLIPPING = "LightningModule.configure_gradient_clipping"

Differs = Callable[[Optimizer, int], str | None]


class ReadBack:
    """Check of each optimizer's next two steps, which warns once.

    Args:
        optimizers: The optimizers to watch. Wrappers that are not optimizers are left out.
        differs: Function that is called after the step with the optimizer and the number of the step, 1 or 2. It
            returns a sentence about what differs from what was set, or ``None``.
    """

    def __init__(self, optimizers: Iterable[Any], differs: Differs) -> None:
        self.active = True
        self._differs = differs
        self._steps: dict[int, int] = {}  # number of steps, by the optimizer's position
        self._hooks: list[RemovableHandle] = []
        for index, optimizer in enumerate(optimizers):
            if isinstance(optimizer, Optimizer):
                self._steps[index] = 0
                self._hooks.append(optimizer.register_step_post_hook(partial(self._read, index)))

    def stop(self) -> None:
        """Remove the check. Not to be called in an optimizer's step, which iterates over the hooks."""
        self.active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _read(self, index: int, optimizer: Optimizer, *_: object) -> None:
        if not self.active:
            return
        self._steps[index] += 1
        message = self._differs(optimizer, self._steps[index])
        self.active = message is None and min(self._steps.values()) < STEPS
        if message is not None:
            rank_zero_warn(message)


def who_sets(module: nn.Module) -> str:
    """Return the words for what may have changed a setting of the optimizer."""
    return f"optimizer_step or another hook of {type(module).__name__}, or a callback"


def clips_itself(trainer: Any, module: nn.Module) -> bool:
    """Return whether a module has its own gradient clipping, which may ignore the trainer's ``gradient_clip_val``."""
    own = getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING
    return bool(trainer.gradient_clip_val) and own and not traits_of(trainer.strategy).flattens


def exceeds_clip_val(module: Any, optimizer: Optimizer, step: int) -> str | None:
    """Return a sentence if an optimizer steps with larger gradients than ``gradient_clip_val`` allows."""
    trainer = module.trainer
    limit = trainer.gradient_clip_val
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # A gradient scaler sets `grad_scale` for a fused optimizer that unscales the gradients in its step.
    if getattr(optimizer, "grad_scale", None) is not None or not gradients:
        return None
    if str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value":
        found = max(_norm(gradient, math.inf) for gradient in gradients)
    else:
        found = math.hypot(*(_norm(gradient, 2.0) for gradient in gradients))
    if not found > TOLERANCE * limit:
        return None
    return (
        f"Trainer(gradient_clip_val={limit:g}) does not hold in the optimizer's step {step}, whose gradients have "
        f"{found:.3g}: {type(module).__name__}.configure_gradient_clipping clips by itself. Call "
        "self.clip_gradients in it with the arguments that it is given, or leave out gradient_clip_val"
    )


def _norm(gradient: Tensor, order: float) -> float:
    """Return the norm of a gradient, which may be sparse or a shard. 16-bit formats are summed in float32."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():
        return 0.0
    norm = torch.linalg.vector_norm(values, order, dtype=torch.promote_types(values.dtype, torch.float32))
    return float(norm.full_tensor() if is_sharded(norm) else norm)


class ValidationAdvice(Callback):
    """Says before the first step that no validation will run before the end of the fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reason = why_never(trainer)
        if reason is not None:
            rank_zero_info(_advice(reason, waiting(trainer)))


def warn_of_no_validation(trainer: Any) -> None:
    """Warn of callbacks that wait for a validation in vain, unless the trainer has a :class:`ValidationAdvice`."""
    waits = waiting(trainer)
    if not waits or any(isinstance(callback, ValidationAdvice) for callback in trainer.callbacks):
        return
    reason = why_never(trainer)
    if reason is not None:
        rank_zero_warn(_advice(reason, waits))


def waiting(trainer: Any) -> list[str]:
    """Return the names of the callbacks that act on a metric of validations, or after each of them."""
    waits = []
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not monitor.startswith("train"):
            waits.append(f"{type(callback).__name__} ({monitor})")
        elif Trait.ACTS_AT_VALIDATION in traits_of_part(callback):
            waits.append(type(callback).__name__)
    return waits


def _advice(reason: str, waits: list[str]) -> str:
    said = f"This fit never validates: {reason}"
    if waits:
        said += f". These wait for validations in vain: {', '.join(waits)}"
    return said


def why_never(trainer: Any) -> str | None:
    """Return the reason why a fit with data for validation never validates; None if it does, or may do so."""
    if not has_validation_data(trainer):
        return None
    if not trainer.limit_val_batches:
        return f"trainer.limit_val_batches is {trainer.limit_val_batches}"
    # Without a sanity check, the list is empty until an epoch that validates begins.
    if trainer.num_val_batches and not sum(trainer.num_val_batches):
        return "its validation data has no batches"
    first = _next_validation(trainer)
    done = trainer.fit_loop.total_batch_idx + 1
    ends = []
    changes = any(Trait.CHANGES_ACCUMULATION in traits_of_part(part) for part in parts_of(trainer))
    if trainer.max_steps >= 0 and trainer.lightning_module.automatic_optimization and not changes:
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        ends.append((done + left, f"trainer.max_steps is {trainer.max_steps}"))
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        batches = trainer.max_epochs * trainer.num_training_batches
        ends.append((batches, f"trainer.max_epochs is {trainer.max_epochs}"))
    if first is None or not ends:
        return None
    end, limit = min(ends)
    if first <= end:
        return None
    return (
        f"{limit}, so it ends after batch {end:g}, and the first validation would follow batch {first:g} "
        f"(trainer.val_check_interval: {trainer.val_check_interval}, check_val_every_n_epoch: "
        f"{trainer.check_val_every_n_epoch})"
    )


def _next_validation(trainer: Any) -> float | None:
    """Return the number of training batches of the run after which it validates next; None if it is not known.

    ``val_check_batch`` is the number of batches between validations, of an epoch or of the run.
    """
    done = trainer.fit_loop.total_batch_idx + 1
    every = trainer.val_check_batch
    length = trainer.num_training_batches
    period = trainer.check_val_every_n_epoch
    if period is None:
        return (done // every + 1) * every
    if length == float("inf"):  # without a length, a validation may also follow the unknown end of an epoch
        return None
    every = min(every, length)  # infinite: at the end of an epoch
    epoch = int(done // length)
    if (epoch + 1) % period == 0:
        inside = (done % length // every + 1) * every
        if inside <= length:
            return epoch * length + inside
        epoch += 1
    epoch += -(epoch + 1) % period
    return epoch * length + every

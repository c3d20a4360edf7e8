"""Read-back: compare what an optimizer used in its first steps with what a technique has set.

A module may set its own rates, weight decay or accumulation in ``optimizer_step``, and a callback may do so in any
hook, also between the backward pass and the step. What a technique has reported as set is therefore read from the
optimizer right after its step, before a scheduler sets the next values.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lit_efficient.application.gradients import gradients_of
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales

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
        self._hooks: list[Any] = []
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

    def _read(self, index: int, optimizer: Optimizer, *_: Any) -> None:
        if not self.active:
            return
        self._steps[index] += 1
        message = self._differs(optimizer, self._steps[index])
        self.active = message is None and min(self._steps.values()) < STEPS
        if message is not None:
            rank_zero_warn(message)


def who_sets(module: Any) -> str:
    """Return the words for what may have changed a setting of the optimizer."""
    return f"optimizer_step or another hook of {type(module).__name__}, or a callback"


def clips_itself(trainer: Any, module: Any) -> bool:
    """Return whether a module has its own gradient clipping, which may ignore the trainer's ``gradient_clip_val``."""
    own = getattr(module.configure_gradient_clipping, "__qualname__", "") != _CLIPPING
    return bool(trainer.gradient_clip_val) and own and not traits_of(trainer.strategy).flattens


def exceeds_clip_val(module: Any, optimizer: Optimizer, step: int) -> str | None:
    """Return a sentence if an optimizer steps with larger gradients than ``gradient_clip_val`` allows."""
    trainer = module.trainer
    limit = trainer.gradient_clip_val
    gradients = gradients_of(optimizer).values()
    if unscales(optimizer) or not gradients:
        return None
    if str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value":
        found = max(float(gradient.abs().max()) for gradient in gradients)
    else:
        found = float(gradient_norm(gradients) or 0.0)
    if not found > TOLERANCE * limit:
        return None
    return (
        f"Trainer(gradient_clip_val={limit:g}) does not hold in the optimizer's step {step}, whose gradients have "
        f"{found:.3g}: {type(module).__name__}.configure_gradient_clipping clips by itself. Call "
        "self.clip_gradients in it with the arguments that it is given, or leave out gradient_clip_val"
    )

"""Clipping of a trainer by norm, in which a function sees the norm before gradients are scaled.

``Precision.clip_grad_by_norm`` calls ``torch.nn.utils.clip_grad_norm_``, which consists of the two functions that are
called here. Checked with lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_CLIP = "clip_grad_by_norm"
Seen = Callable[[Optimizer, Tensor], bool]
"""Function of an optimizer and the norm of its gradients. Returns whether the gradients are to be scaled."""


def clips_directly(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether Lightning clips by norm, as torch does, and no hook of the module runs before it in a step."""
    hooks = (module.on_before_optimizer_step, module.configure_gradient_clipping)
    are_lightnings = all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)
    clip = getattr(trainer.precision_plugin.clip_grad_by_norm, "__qualname__", "")
    clips = module.automatic_optimization and are_lightnings and clip == "Precision.clip_grad_by_norm"
    return clips and clips_by_norm(trainer)


def clips_by_norm(trainer: Trainer) -> bool:
    """Return whether the present settings of a trainer clip by norm. Callbacks may change them during a run."""
    return (trainer.gradient_clip_val or 0) > 0 and trainer.gradient_clip_algorithm in (None, "norm")


def watch_norm(plugin: Any, seen: Seen) -> None:
    """Let ``seen`` decide about each clipping of a precision, until `leave_norm`."""
    vars(plugin)[_CLIP] = partial(_clip, plugin, seen)


def leave_norm(plugin: Any) -> None:
    """Undo `watch_norm`."""
    method = vars(plugin).get(_CLIP)
    if isinstance(method, partial) and method.func is _clip:
        del vars(plugin)[_CLIP]


def _clip(plugin: Any, seen: Seen, optimizer: Optimizer, clip_val: float) -> None:
    parameters = list(plugin.main_params(optimizer))
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if seen(optimizer, norm):
        clip_grads_with_norm_(parameters, clip_val, norm)

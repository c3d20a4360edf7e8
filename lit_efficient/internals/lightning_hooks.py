"""Fewer calls of Python in each step of a trainer: empty hooks of callbacks, and a profiler that measures nothing.

In a step Lightning calls six hooks of each callback, each inside a context of the profiler, whether or not the class
overrides the hook. ``call._call_callback_hooks`` leaves out hooks that are not callable. Checked with lightning 2.6.6.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PassThroughProfiler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_OWN = ("lit_efficient", "lightning", "pytorch_lightning")
_NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Profiler that measures nothing, with one context for all actions."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context that does nothing."""
        return _NOTHING


def skip_empty_hooks(trainer: Trainer) -> None:
    """Let a trainer skip the hooks of a step that a callback does not override, and the contexts of no profiler.

    Callbacks of other packages are left alone, because they may call their own empty hooks. The decision is made once,
    because deciding in each step would cost the calls that are saved. A hook that is set on a callback is called even
    if it is set later. A hook that its class gets later, also by a change of ``__class__``, is not called.
    """
    made: Any = trainer  # its type does not declare these attributes
    if type(made.profiler) is PassThroughProfiler:
        made.profiler = NoProfiler()
    for callback in made.callbacks:
        if type(callback).__module__.partition(".")[0] not in _OWN:
            continue
        for name in _STEP_HOOKS:
            hook = getattr(type(callback), name, None)
            if getattr(hook, "__qualname__", "") == f"Callback.{name}":
                vars(callback).setdefault(name, None)

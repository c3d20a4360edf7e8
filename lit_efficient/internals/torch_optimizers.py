"""Private attributes of torch's optimizers and schedulers, and private functions with which optimizers step.

These are functions of Muon, and ``torch._foreach_*``: operations on lists of tensors with one kernel. Checked with
torch 2.13.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import _foreach_add_ as foreach_add_
from torch import _foreach_addcmul_ as foreach_addcmul_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_div as foreach_div
from torch import _foreach_div_ as foreach_div_
from torch import _foreach_lerp as foreach_lerp
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch import _foreach_sign_ as foreach_sign_
from torch import _foreach_sqrt as foreach_sqrt
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr as muon_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised

__all__ = [
    "HOOKS",
    "INNER_SCHEDULERS",
    "LAST_RATES",
    "foreach_add_",
    "foreach_addcmul_",
    "foreach_copy_",
    "foreach_div",
    "foreach_div_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sign_",
    "foreach_sqrt",
    "fused_devices",
    "is_counted",
    "leave_unscaling",
    "mark_counted",
    "mark_stepped",
    "muon_rate",
    "orthogonalised",
    "unscales",
    "without_step_hooks",
]

# Attributes that hold the registered hooks of an optimizer.
HOOKS = tuple(
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
LAST_RATES = "_last_lr"  # attribute of a scheduler, and key of its state, with the rates that it has set last
INNER_SCHEDULERS = "_schedulers"  # attribute of SequentialLR and ChainedScheduler


def fused_devices() -> list[str]:
    """Return the types of devices with fused kernels: ``_get_fused_kernels_supported_devices``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return _get_fused_kernels_supported_devices()


def leave_unscaling(optimizer: Any) -> None:
    """Leave unscaling of gradients to the gradient scaler: ``_step_supports_amp_scaling``.

    Lightning does not clip gradients for optimizers that unscale them, as fused ones do by default.
    """
    optimizer._step_supports_amp_scaling = False


def unscales(optimizer: Optimizer) -> bool:
    """Return whether an optimizer unscales gradients in its step: ``_step_supports_amp_scaling``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_counted(step: object) -> bool:
    """Return whether a scheduler counts the calls of this ``Optimizer.step``: ``_wrapped_by_lr_sched``."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_counted(step: Any) -> None:
    """Mark a ``step`` that calls :func:`mark_stepped`, so that schedulers do not wrap it: ``_wrapped_by_lr_sched``."""
    step._wrapped_by_lr_sched = True


def mark_stepped(optimizer: Optimizer) -> None:
    """Record for schedulers that the optimizer has stepped: ``_opt_called``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Context in which ``step`` runs without the optimizer's own pre and post hooks.

    They are in ``_optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks``.
    """
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(optimizer, name, hooks)

"""What torch keeps on optimizers and schedulers beside their public state. Checked with torch 2.13."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

# The attributes that hold an optimizer's registered hooks.
HOOKS = tuple(
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
LAST_RATES = "_last_lr"  # a scheduler's attribute and a key of its state: the rates that it set last
INNER_SCHEDULERS = "_schedulers"  # those that SequentialLR and ChainedScheduler hold


def fused_devices() -> list[str]:
    """Types of devices with fused kernels: ``torch.utils._foreach_utils._get_fused_kernels_supported_devices``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return _get_fused_kernels_supported_devices()


def leave_unscaling(optimizer: Any) -> None:
    """Leave unscaling to the scaler, so that Lightning clips a fused optimizer, too: ``_step_supports_amp_scaling``."""
    optimizer._step_supports_amp_scaling = False


def unscales(optimizer: Any) -> bool:
    """Whether gradients are still scaled when the optimizer is about to step: ``_step_supports_amp_scaling``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_counted(step: Any) -> bool:
    """Whether a scheduler counts the calls of this ``Optimizer.step``: ``_wrapped_by_lr_sched``."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_counted(step: Any) -> None:
    """Tell schedulers that this ``step`` calls :func:`mark_stepped`: ``_wrapped_by_lr_sched``."""
    step._wrapped_by_lr_sched = True


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped before them: ``_opt_called``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Let steps run without the hooks that were registered on the optimizer: ``_optimizer_step_post_hooks``."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(optimizer, name, hooks)

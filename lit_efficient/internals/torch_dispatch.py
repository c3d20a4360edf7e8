"""Seeing every operator, every storage and what is saved for a backward pass. Checked with torch 2.13."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

__all__ = [
    "ASKS_DEVICE",
    "HigherOrderOperator",
    "TorchDispatchMode",
    "after_backward",
    "backward_runs",
    "changes_arguments",
    "fakes_are_made",
    "is_traceable_wrapper_subclass",
    "no_dispatch_modes",
    "operator_of",
    "recomputes",
    "saving_hooks",
    "storage_id",
    "truncated_draws",
]

# What a tensor without values is asked for its device by, through every mode: more than half of all calls of a plan.
ASKS_DEVICE = torch.ops.prim.device.default


def storage_id(storage: torch.UntypedStorage) -> int:
    """One number for all Python objects of one storage, while it lives: ``UntypedStorage._cdata``."""
    return storage._cdata


def fakes_are_made() -> bool:
    """Whether all tensors are made without values now: ``torch._C._get_dispatch_mode``."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def saving_hooks() -> tuple[Any, Any] | None:
    """The innermost ``saved_tensors_hooks``: ``torch._C._autograd._top_saved_tensors_default_hooks``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def backward_runs() -> bool:
    """Whether autograd is computing a gradient in this thread: ``torch._C._current_graph_task_id``."""
    return torch._C._current_graph_task_id() >= 0


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs is over: ``Variable._execution_engine.queue_callback``."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def recomputes(outer: Any) -> bool:
    """Whether a checkpoint computes a part of the forward pass anew: ``torch._C._current_autograd_node``.

    It does so under hooks other than ``outer``, which :func:`saving_hooks` returned outside, or, with
    ``use_reentrant``, as the node that is being computed.
    """
    if not backward_runs():
        return False
    hooks = saving_hooks()
    node = type(torch._C._current_autograd_node()).__name__
    return (hooks is not None and hooks != outer) or node == "CheckpointFunctionBackward"


def changes_arguments(func: Any) -> bool:
    """Whether an operator writes into a tensor that it is given: ``_schema.is_mutable``; a function may."""
    return not hasattr(func, "_schema") or bool(func._schema.is_mutable)


@contextmanager
def truncated_draws(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have ``trunc_normal_``, which rejects draws by their numbers, done otherwise: ``_no_grad_trunc_normal_``."""
    inner = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = change(inner)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = inner


def operator_of(func: Any) -> tuple[Any, str]:
    """What formulas of an operator go by, and its name with its namespace: ``_overloadpacket`` and ``_schema``."""
    if isinstance(func, HigherOrderOperator):
        return func, func.name()
    return func._overloadpacket, func._schema.name

"""Seeing every operator, every storage and what is saved for a backward pass. Checked with torch 2.13."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

__all__ = [
    "HigherOrderOperator",
    "TorchDispatchMode",
    "backward_runs",
    "is_traceable_wrapper_subclass",
    "no_dispatch_modes",
    "operator_of",
    "recomputes",
    "saving_hooks",
    "storage_id",
]


def storage_id(storage: torch.UntypedStorage) -> int:
    """One number for all Python objects of one storage, while it lives: ``UntypedStorage._cdata``."""
    return storage._cdata


def saving_hooks() -> tuple[Any, Any] | None:
    """The innermost ``saved_tensors_hooks``: ``torch._C._autograd._top_saved_tensors_default_hooks``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def backward_runs() -> bool:
    """Whether autograd is computing a gradient in this thread: ``torch._C._current_graph_task_id``."""
    return torch._C._current_graph_task_id() >= 0


def recomputes(outer: Any) -> bool:
    """Whether a checkpoint computes a part of the forward pass anew: ``torch._C._current_autograd_node``.

    It does so under hooks of its own or, with ``use_reentrant``, as the node that is being computed.

    Args:
        outer: What :func:`saving_hooks` returned outside.
    """
    if not backward_runs():
        return False
    hooks = saving_hooks()
    node = type(torch._C._current_autograd_node()).__name__
    return (hooks is not None and hooks != outer) or node == "CheckpointFunctionBackward"


def operator_of(func: Any) -> tuple[Any, str]:
    """What formulas of an operator go by, and its name with its namespace: ``_overloadpacket`` and ``_schema``."""
    if isinstance(func, HigherOrderOperator):
        return func, func.name()
    return func._overloadpacket, func._schema.name

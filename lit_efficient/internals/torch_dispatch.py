"""Seeing every operator, every storage and what is saved for a backward pass. Checked with torch 2.13."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

__all__ = [
    "TorchDispatchMode",
    "backward_runs",
    "is_traceable_wrapper_subclass",
    "no_dispatch_modes",
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

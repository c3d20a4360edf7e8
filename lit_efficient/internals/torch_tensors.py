"""What hangs on a tensor, and what its device lacks. Checked with torch 2.13."""

from typing import Any

import torch
from torch import Tensor


def hooks_after_accumulation(tensor: Tensor) -> Any:
    """What ``register_post_accumulate_grad_hook`` has registered, if anything: ``_post_accumulate_grad_hooks``."""
    return tensor._post_accumulate_grad_hooks


def gradient_hooks(tensor: Tensor) -> Any:
    """What ``register_hook`` has registered, if anything: ``_backward_hooks``."""
    return tensor._backward_hooks


def version(tensor: Tensor) -> int:
    """How often a tensor's memory has been written to, through it or its views: ``_version``."""
    return tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of: ``_base``."""
    return tensor._base


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where a device has none, as Metal."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32

"""Private attributes of tensors, and the widest float of a device. Checked with torch 2.13."""

import torch
from torch import Tensor


def hooks_after_accumulation(tensor: Tensor) -> object:
    """Return the hooks of ``register_post_accumulate_grad_hook``, if any: ``_post_accumulate_grad_hooks``."""
    return tensor._post_accumulate_grad_hooks


def gradient_hooks(tensor: Tensor) -> object:
    """Return the hooks of ``register_hook``, if any: ``_backward_hooks``."""
    return tensor._backward_hooks


def version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor and its views: ``_version``."""
    return tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which a tensor is a view, or ``None``: ``_base``."""
    return tensor._base


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without it, such as Metal."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32

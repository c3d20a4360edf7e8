"""What hangs on a tensor. Checked with torch 2.13."""

from typing import Any

from torch import Tensor


def hooks_after_accumulation(tensor: Tensor) -> Any:
    """What ``register_post_accumulate_grad_hook`` has registered, if anything: ``_post_accumulate_grad_hooks``."""
    return tensor._post_accumulate_grad_hooks

"""Evaluate for a moment, then put every submodule back into the mode it was in; how exactly a network computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the body with ``module`` and all its submodules in eval mode.

    Modes are remembered for each submodule: ``module.train(was_training)`` would wake up frozen parts (a batch norm
    kept in eval mode, say) that share the module with training ones.
    """
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def whole_precision(module: nn.Module, device: torch.device) -> bool:
    """Whether ``module`` computes in float32 or more: no weight has fewer bits, and nothing is cast on the way."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return not torch.is_autocast_enabled(device.type) and dtypes <= {torch.float32, torch.float64}

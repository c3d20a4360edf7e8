"""Private state of FSDP. That of FSDP2 is created in the first forward pass. Checked with torch 2.13."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_in_flat_vector

__all__ = ["drop_gathered", "is_in_flat_vector", "make_root", "never_gathered", "sharded_modules"]


def make_root(module: nn.Module) -> None:
    """Make a sharded module the root of all sharded modules inside it. Otherwise the first one called becomes the root.

    Raises:
        RuntimeError: From torch, for parameters that it cannot gather together.
    """
    sharded: Any = module
    sharded._get_fsdp_state()._lazy_init()


def sharded_modules(module: nn.Module) -> list[Any]:
    """Return all FSDP modules in ``module``, which may be one itself."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def never_gathered(module: Any) -> list[Any]:
    """Return the FSDP modules whose weights have never been gathered, although the backward pass expects them.

    ``_fsdp_param_groups``, ``fsdp_params`` and ``_unsharded_param``.
    """
    found = []
    for part in sharded_modules(module):
        groups = part._get_fsdp_state()._fsdp_param_groups
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        if not all(hasattr(parameter, "_unsharded_param") for parameter in parameters):
            found.append(part)
    return found


def drop_gathered(module: nn.Module) -> None:
    """Free all gathered weights, even in the middle of a forward pass, where ``reshard`` does nothing.

    ``_fsdp_param_groups`` and ``_to_sharded``.
    """
    for part in sharded_modules(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()

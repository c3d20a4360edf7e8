"""What FSDP2 decides at the first forward pass, by private names. Checked with torch 2.13."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def make_root(module: nn.Module) -> None:
    """Let a sharded module be the root of all sharded ones within it: else whichever is called first is one.

    Raises:
        RuntimeError: Of torch's, for parameters that it cannot gather together.
    """
    sharded: Any = module
    sharded._get_fsdp_state()._lazy_init()


def sharded_modules(module: nn.Module) -> list[Any]:
    """The modules, ``module`` itself among them, whose parameters are gathered together."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def never_gathered(module: Any) -> list[Any]:
    """Those of the sharded modules whose gathered weights the end of a backward pass would ask for in vain.

    By ``_fsdp_param_groups``, ``fsdp_params`` and ``_unsharded_param``.
    """
    groups = {part: part._get_fsdp_state()._fsdp_param_groups for part in sharded_modules(module)}
    return [
        part
        for part, own in groups.items()
        if not all(hasattr(parameter, "_unsharded_param") for group in own for parameter in group.fsdp_params)
    ]


def drop_gathered(module: nn.Module) -> None:
    """Drop all gathered weights, even of a module in the middle of its forward pass, where ``reshard`` does nothing.

    By ``_fsdp_param_groups`` and ``_to_sharded``.
    """
    for part in sharded_modules(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()

"""What techniques refuse of the network, such as patterns that match nothing, said before a fit prepares its data."""

import copy
import logging
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lit_efficient.application import apply
from lit_efficient.declaration import Phase, in_order, overrides, techniques_of
from lit_efficient.errors import LitEfficientError
from lit_efficient.internals.lightning_trainer import set_trainer
from lit_efficient.mechanisms.trials.steps import quiet


def rehearse(trainer: Any, module: Any, data: Any) -> None:
    """Have a copy of the module without weights changed by copies of the techniques; nothing of the fit is touched.

    Only what is certain counts. Where a ``setup`` that wants data may build the network, the network cannot be built
    without weights, or a technique reads them, the fit itself says what is wrong.

    Raises:
        LitEfficientError: What a technique says of the network.
    """
    techniques = in_order(one for one in techniques_of(trainer) if overrides(one, "transform"))
    builds = is_overridden("setup", module) and not getattr(type(module).setup, "builds_no_layers", False)
    if builds or not any(technique.refuses_early for technique in techniques):
        return
    trainer.datamodule = data  # as the fit does in a moment
    memo: dict[int, Any] = {id(trainer): trainer}
    with torch.random.fork_rng(devices=[]), quiet(logging.WARNING, warns=False):
        try:
            memo |= {id(one): _empty(one) for one in (*module.parameters(), *module.buffers())}
            copied = copy.deepcopy(module, memo)
            set_trainer(copied, trainer)
            with torch.device("meta"):
                type(copied).configure_model(copied)
        except Exception:  # cannot be copied, or built without data or values
            return
        for technique in techniques:
            if not technique.refuses_early:
                if technique.phase is Phase.ARCHITECTURE:  # what comes later meets other layers
                    return
                continue
            try:
                with torch.device("meta"):
                    apply(copied, [copy.deepcopy(technique, memo)])
            except Exception as error:
                if is_meant(error):
                    raise
                return  # for want of values


def is_meant(error: Exception) -> bool:
    """Whether an error of a network without weights says something of the network, and not that weights lack."""
    return isinstance(error, LitEfficientError) and "meta device" not in str(error)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

"""Weights that the module's own hooks overwrite at the start of a fit.

Lightning calls ``on_fit_start`` and ``on_train_start`` of the module after techniques have changed the network and
after a checkpoint has been restored. A module that initialises its weights there also initialises the adapters that
techniques have added, and overwrites what was restored.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Wrap, in_order, overrides, techniques_of
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_shards import is_wrapper, local
from lit_efficient.internals.wraps import inner_method

_SAMPLES = 1024  # values of each parameter that are compared


def wraps_of_start(module: Any) -> list[Wrap]:
    """Return the wraps of the hooks that the module defines; Lightning's own hooks do nothing."""
    own = [("on_fit_start", _on_fit_start), ("on_train_start", _on_train_start)]
    return [(name, wrap) for name, wrap in own if _is_defined(module, name)]


def _is_defined(module: Any, name: str) -> bool:
    return getattr(getattr(module, name), "__qualname__", "") != f"ModelHooks.{name}"


def _on_fit_start(self: Any) -> None:
    _watched(self, "on_fit_start", inner_method(self, "on_fit_start", _on_fit_start))


def _on_train_start(self: Any) -> None:
    _watched(self, "on_train_start", inner_method(self, "on_train_start", _on_train_start))


def _watched(module: Any, hook: str, call: Callable[[], object]) -> None:
    """Call a hook of the module, and compare the parameters with those before.

    Raises:
        ConfigurationError: If the hook has changed parameters that a technique has added.
    """
    before = _samples(module)
    call()
    after = _samples(module)
    changed = [name for name in after if name in before and not torch.equal(after[name], before[name])]
    if not changed:
        return
    where = f"{type(module).__name__}.{hook}"
    hooks: list[Any] = [one for one in in_order(techniques_of(module.trainer)) if overrides(one, "adapters")]
    for technique in hooks:
        added = {id(p) for p in technique.adapters(module)}
        lost = [name for name in changed if id(module.get_parameter(name)) in added]
        if lost:
            raise ConfigurationError(
                f"{type(technique).__name__}: {where} overwrites {len(lost)} of the {len(added)} parameters that "
                f"{type(technique).__name__} has added, first {lost[0]!r}, so that training would not start from the "
                "network's own weights. Initialise the network, or load its weights, in __init__, setup or "
                "configure_model, which come before techniques act"
            )
    trainer = module.trainer
    restored = hook == "on_train_start" or not trainer.strategy.restore_checkpoint_after_setup
    if trainer.ckpt_path is not None and restored:
        rank_zero_warn(
            f"{where} overwrites {len(changed)} of the {len(after)} parameters that the checkpoint restored, first "
            f"{changed[0]!r}: the run does not continue from the checkpoint's weights. Initialise in __init__ or "
            "configure_model, or only where self.trainer.global_step is 0"
        )


def _samples(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of some values of each parameter. Quantised weights and those without values have none."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta or is_wrapper(parameter) or not local(parameter).numel():
            continue
        values = local(parameter).detach().reshape(-1)
        found[name] = values[:: max(1, values.numel() // _SAMPLES)].clone()
    return found

"""Code that is no technique and changes the network: what callbacks and the module's own hooks do to its parameters.

Lightning calls ``Callback.setup`` before ``configure_model``, where techniques change the network. A callback that has
copied the module in ``setup``, or has collected its layers, may hold a network that no longer exists
(:func:`check_held`). In the run, a callback may put other parameters in the place of those that the optimizer steps, as
pruning and parametrizations do. Techniques that follow parameters by name or identity would act on the old ones
(:func:`watch_parameters`).

Lightning calls ``on_fit_start`` and ``on_train_start`` of the module after techniques have changed the network and
after a checkpoint has been restored. A module that initialises its weights there also initialises the adapters that
techniques have added, and overwrites what was restored (:func:`wraps_of_start`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lit_efficient.declaration import Declaration, Wrap, in_order, overrides, techniques_of
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_trainer import hook_of
from lit_efficient.internals.torch_shards import is_wrapper, local
from lit_efficient.internals.wraps import inner_method

_AFTER_TRAINING = ("on_train_end", "on_fit_end", "teardown")
_NESTED = 3  # levels of containers that are searched for modules
_SAMPLES = 1024  # values of each parameter that are compared


def modules_of(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Return the modules of a network with their names, by ``id``."""
    return {id(part): (name, part) for name, part in module.named_modules()}


def check_held(
    trainer: Any, module: nn.Module, kind: type, before: dict[int, tuple[str, nn.Module]], changed: str
) -> None:
    """Refuse a callback that keeps a copy of the module, or layers of it, from before techniques changed the network.

    Args:
        trainer: The trainer.
        module: The module, after the transforms.
        kind: Its class before the transforms.
        before: Its modules before the transforms (:func:`modules_of`).
        changed: Names of the techniques that changed it, for the message.

    Raises:
        ConflictError: Naming the callback and what it holds.
    """
    now = modules_of(module)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    for callback in trainer.callbacks:
        if isinstance(callback, Declaration):
            continue
        who = type(callback).__name__
        for held in _modules_in(vars(callback).values(), _NESTED):
            gone = before.get(id(held))
            if gone is not None and id(held) not in now:
                raise ConflictError(
                    f"{who} holds the layer {gone[0]!r} of {type(module).__name__}, which {changed} has replaced, so "
                    f"that it would act on a layer that nothing runs: leave {who} or {changed} out"
                )
            for part in held.modules():
                if part is module or id(part) in now or type(part) is not kind:
                    continue
                own = {name: p.shape for name, p in part.named_parameters()}
                different = sorted(own.items() ^ shapes.items())
                if different:
                    raise ConflictError(
                        f"{who} has copied {type(module).__name__} before {changed} changed the parameters of the "
                        f"network, first {different[0][0]!r}, so that it would combine parameters that do not belong "
                        f"together: use EMA or CheckpointAverage for an average, or leave {who} or {changed} out"
                    )


def _modules_in(values: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules in plain containers."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif depth and type(value) in (list, tuple, set):
            yield from _modules_in(value, depth - 1)
        elif depth and type(value) is dict:
            yield from _modules_in(value.values(), depth - 1)


def watch_parameters(module: LightningModule, followers: Sequence[str]) -> list[Any]:
    """Refuse from now on that parameters of ``module`` are registered, and return the handles that end this.

    torch calls a hook whenever a module registers a parameter: no step takes time for this check.

    Args:
        module: The LightningModule in a fit.
        followers: Names of the techniques that follow its parameters.
    """
    known = WeakSet(module.modules())
    owner = ref(module)

    def on_parameter(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if part in known and getattr(part, name, None) is not parameter:
            _refuse(owner(), part, name, followers)

    def on_module(part: nn.Module, name: str, added: nn.Module | None) -> None:
        if added is None or part not in known:
            return
        if any(True for _ in added.parameters()) and getattr(part, name, None) is not added:
            _refuse(owner(), part, name, followers)
        known.update(added.modules())

    return [
        register_module_parameter_registration_hook(on_parameter),
        register_module_module_registration_hook(on_module),
    ]


def _refuse(module: Any, part: nn.Module, name: str, followers: Sequence[str]) -> None:
    if module is None or hook_of(module) in _AFTER_TRAINING:
        return
    where = next((known for known, one in module.named_modules() if one is part), "")
    who = _caller(module)
    raise ConflictError(
        f"{who} puts another parameter into the network during the run ({f'{where}.{name}'.lstrip('.')!r}), and "
        f"{', '.join(followers)} would go on with the one that it replaces: change the network in __init__, setup or "
        "configure_model of the module, change weights in place under torch.no_grad(), or leave out "
        f"{' or '.join(followers)}"
    )


def _caller(module: Any) -> str:
    """Return the name of the callback, or of the module, whose hook runs now, with the hook."""
    parts = {id(part): type(part).__name__ for part in [*module.trainer.callbacks, module]}
    frame = sys._getframe(1)
    while frame is not None:
        name = parts.get(id(frame.f_locals.get("self")))
        if name is not None and not frame.f_globals.get("__name__", "").startswith("lit_efficient.application"):
            return f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return type(module).__name__


def wraps_of_start(module: nn.Module) -> list[Wrap]:
    """Return the wraps of the hooks that the module defines; Lightning's own hooks do nothing."""
    own = [("on_fit_start", _on_fit_start), ("on_train_start", _on_train_start)]
    return [(name, wrap) for name, wrap in own if _is_defined(module, name)]


def _is_defined(module: nn.Module, name: str) -> bool:
    return getattr(getattr(module, name), "__qualname__", "") != f"ModelHooks.{name}"


def _on_fit_start(self: LightningModule) -> None:
    _watched(self, "on_fit_start", inner_method(self, "on_fit_start", _on_fit_start))


def _on_train_start(self: LightningModule) -> None:
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

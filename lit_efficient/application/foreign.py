"""Callbacks that are no techniques and change the network: what they do to its parameters is refused with a sentence.

Lightning calls ``Callback.setup`` before ``configure_model``, where techniques change the network. A callback that has
copied the module in ``setup``, or has collected its layers, may hold a network that no longer exists
(:func:`check_held`). In the run, a callback may put other parameters in the place of those that the optimizer steps, as
pruning and parametrizations do. Techniques that follow parameters by name or identity would act on the old ones
(:func:`watch_parameters`).
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet, ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lit_efficient.declaration import Declaration
from lit_efficient.errors import ConflictError
from lit_efficient.internals.lightning_trainer import hook_of

_AFTER_TRAINING = ("on_train_end", "on_fit_end", "teardown")
_NESTED = 3  # levels of containers that are searched for modules


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


def watch_parameters(module: Any, followers: Sequence[str]) -> list[Any]:
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

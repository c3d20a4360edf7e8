"""Helpers for the ``step`` of optimizers, and for classes that replace the step of another class."""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_optimizers import mark_counted, mark_stepped


def loss_of(closure: Callable[[], object] | None) -> Any:
    """Run the closure of a ``step`` with gradients enabled, and return its loss. Return ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient."""
    return [p for p in group["params"] if p.grad is not None]


def adamw(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor], decays: bool = True, fused: bool = False
) -> None:
    """Step some parameters of a group with torch's AdamW.

    Args:
        optimizer: Optimizer that holds the states.
        group: Parameter group, for its settings.
        parameters: Parameters of the group, each with a gradient.
        decays: Apply weight decay.
        fused: Use the fused kernel.
    """
    if not parameters:
        return
    for p in parameters:
        if not optimizer.state[p]:
            steps = torch.zeros((), device=p.device if fused else "cpu", dtype=torch.float32)
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] |= {"step": steps, **moments}
    states = [optimizer.state[p] for p in parameters]
    adam(
        parameters,
        [p.grad for p in parameters],  # type: ignore[misc]
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=fused or None,
        has_complex=any(map(torch.is_complex, parameters)),
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"] if decays else 0.0,
        eps=group["eps"],
        maximize=False,
    )


def pieces(parameters: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Split parameters into lists of at most ``piece_bytes`` bytes. A larger parameter is a list of its own."""
    piece: list[Tensor] = []
    size = 0
    for p in parameters:
        if piece and size + p.nbytes > piece_bytes:
            yield piece
            piece = []
            size = 0
        piece.append(p)
        size += p.nbytes
    if piece:
        yield piece


def step_some(
    optimizer: Optimizer, step: Callable[[Any], object], group: dict[str, object], parameters: list[Tensor]
) -> dict[str, Any]:
    """Step some parameters of a group, with the settings of the group.

    Args:
        optimizer: The optimizer.
        step: Step of the optimizer, without hooks. It must treat each parameter independently.
        group: A parameter group. It does not change.
        parameters: Parameters to step.

    Returns:
        Values that the step has written to the group, such as a counter.
    """
    part = group | {"params": parameters}
    groups = optimizer.param_groups
    optimizer.param_groups = [part]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
    # The optimizer itself stands for a missing key: no group contains it.
    return {key: value for key, value in part.items() if key != "params" and value is not group.get(key, optimizer)}


def restore_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give states the dtypes in ``state_dict``, after ``load_state_dict`` has cast them to those of the parameters.

    Some optimizers, such as CAME, keep float32 states of bfloat16 parameters.
    """
    ids = (i for group in state_dict["param_groups"] for i in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for i, p in zip(ids, parameters, strict=True):
        for key, value in state_dict["state"].get(i, {}).items():
            cast = optimizer.state[p].get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and value.dtype != cast.dtype:
                optimizer.state[p][key] = value.to(cast.device, copy=True)


def keep_dtypes(optimizer: Optimizer, wanted: Callable[[], bool]) -> None:
    """Let ``load_state_dict`` keep the dtypes of states if ``wanted`` then returns true."""
    given: dict[str, Any] = {}

    def note(_: Optimizer, state_dict: dict[str, Any]) -> None:
        given.update(state_dict)

    def restore(optimizer: Optimizer) -> None:
        if wanted():
            restore_dtypes(optimizer, given)
        given.clear()

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(restore)


def check_unchanged(optimizer: Optimizer, written: Collection[str], who: str) -> None:
    """Raise ConfigurationError if a step over some parameters has written to their group, which holds others too."""
    if written:
        raise ConfigurationError(
            f"{who}: the step of {type(optimizer).__name__} writes {', '.join(map(repr, written))} to its parameter "
            f"groups, so it cannot step some parameters at a time; train without {who}"
        )


def unhooked(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without its hooks, which are in the function that torch wraps around each step."""
    step: Any = kind.step
    if getattr(step, "hooked", False):
        return step.__wrapped__
    return step


def with_step(
    kind: type[Optimizer], mark: type[Optimizer], step: Callable[..., object], **methods: object
) -> type[Optimizer]:
    """Return a class with a new step.

    Args:
        kind: Base class. The new class has its name.
        mark: Second base class, by which such optimizers are recognised.
        step: The new step. Hooks run around it.
        **methods: Further attributes of the class.
    """
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return type(kind.__name__, (kind, mark), {"step": hooked, "__module__": kind.__module__, **methods})


def change_class(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Change the class of ``optimizer``, in place, to a subclass that has another step.

    A scheduler may have replaced ``step`` on the instance by a counting one that calls the step of the old class. It is
    replaced by one that calls the step of the new class.
    """
    optimizer.__class__ = kind
    if "step" in optimizer.__dict__:
        step = functools.partial(_counted_step, optimizer)
        mark_counted(step)
        optimizer.__dict__["step"] = step


def _counted_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:
    mark_stepped(optimizer)
    return type(optimizer).step(optimizer, *args, **kwargs)

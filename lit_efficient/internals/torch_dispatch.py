"""Access to operators, storages and the state of the backward pass. Checked with torch 2.13."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

__all__ = [
    "ASKS_DEVICE",
    "HigherOrderOperator",
    "TorchDispatchMode",
    "after_backward",
    "backward_runs",
    "changes_arguments",
    "compared_axis",
    "fakes_are_made",
    "has_values",
    "is_traceable_wrapper_subclass",
    "no_dispatch_modes",
    "operator_of",
    "recomputes",
    "running_node",
    "saving_hooks",
    "storage_id",
    "truncated_draws",
]

# Operator that reads the device of a fake tensor. It passes through every mode, and is over half of all calls of a
# plan.
ASKS_DEVICE = torch.ops.prim.device.default


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return an id that all Python objects of one storage share, while it exists: ``UntypedStorage._cdata``."""
    return storage._cdata


def fakes_are_made() -> bool:
    """Return whether a fake tensor mode is active: ``torch._C._get_dispatch_mode``."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: it is no fake tensor, not on the meta device, and not one expanded number.

    ``check`` puts expanded zeros in the place of weights.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout != torch.strided or tensor.numel() < 2 or any(tensor.stride())


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost ``saved_tensors_hooks``: ``torch._C._autograd._top_saved_tensors_default_hooks``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def backward_runs() -> bool:
    """Return whether a backward pass is running in this thread: ``torch._C._current_graph_task_id``."""
    return torch._C._current_graph_task_id() >= 0


def running_node() -> tuple[str, int] | None:
    """Return name and number of the node whose gradients a backward pass computes or adds to those of other nodes.

    ``torch._C._current_autograd_node``; ``None`` outside of a backward pass.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass: ``Variable._execution_engine.queue_callback``."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def recomputes(outer: nn.Module) -> bool:
    """Return whether activation checkpointing is recomputing a part of the forward pass.

    It is if other hooks are active than ``outer``, the :func:`saving_hooks` outside the checkpoint, or, with
    ``use_reentrant``, if the node of a checkpoint is being computed: ``torch._C._current_autograd_node``.
    """
    if not backward_runs():
        return False
    hooks = saving_hooks()
    node = type(torch._C._current_autograd_node()).__name__
    return (hooks is not None and hooks != outer) or node == "CheckpointFunctionBackward"


def changes_arguments(func: Callable[..., object]) -> bool:
    """Return whether an operator may write to its arguments: ``_schema.is_mutable``. Functions without schema may."""
    return not hasattr(func, "_schema") or bool(func._schema.is_mutable)


@contextmanager
def truncated_draws(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context in which ``trunc_normal_`` is replaced by ``change`` of it: ``_no_grad_trunc_normal_``.

    Its rejection of draws depends on values, which fake tensors do not have.
    """
    inner = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = change(inner)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = inner


def operator_of(func: Any) -> tuple[object, str]:
    """Return the overload packet of an operator, and its name with namespace: ``_overloadpacket``, ``_schema``."""
    if isinstance(func, HigherOrderOperator):
        return func, func.name()
    return func._overloadpacket, func._schema.name


def compared_axis(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> int | None:
    """Return the axis of an operator that returns one tensor, or two, and changes none: ``_schema``."""
    if isinstance(func, HigherOrderOperator) or func._schema.is_mutable:
        return None
    named = [argument.name for argument in func._schema.arguments]
    returned = [str(value.type) for value in func._schema.returns]
    if "dim" not in named or returned not in (["Tensor"], ["Tensor", "Tensor"]):
        return None
    default = func._schema.arguments[named.index("dim")].default_value
    dim = {**dict(zip(named, args)), **kwargs}.get("dim", default)
    return dim if isinstance(dim, int) else None

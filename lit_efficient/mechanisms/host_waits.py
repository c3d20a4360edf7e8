"""Where a step lets the host wait for its device: reads of a value, and copies that are not asked to be non-blocking.

A device works off a queue; after a wait the queue is empty, and the device idles until the host has filled it again.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

from torch import Tensor

from lit_efficient.internals.torch_dispatch import TorchDispatchMode, operator_of
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method

_READS = {"local_scalar_dense": "reads a value", "equal": "compares", "nonzero": "counts what is true"}
_READS |= {"masked_select": "counts what is true", "unique2": "counts what differs"}
_WATCHES = "_lit_efficient_watches"  # of a strategy: makers of the contexts that its passes run in
_OURS = __name__.partition(".")[0]
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", _OURS)


class HostWaits(TorchDispatchMode):
    """Note where the host waits for a device while active: ``places`` counts ``file:line: what``.

    Example:
        >>> import torch
        >>> with HostWaits() as waits:
        ...     _ = torch.ones(3).sum().item()  # a CPU is not waited for
        >>> waits.places
        Counter()
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator_of(func)[1].rpartition("::")[2].lstrip("_")
        may_wait = name in _READS or name in ("to_copy", "copy_")
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)] if may_wait else []
        if tensors and (what := self._wait(name, tensors, args, kwargs)):
            self.places[f"{place_of(sys._getframe(1))}: {what}"] += 1
        return func(*args, **kwargs)

    @staticmethod
    def _wait(name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> str:
        away = [x.device.type != "cpu" for x in tensors]
        if name in _READS:
            return _READS[name] if any(away) else ""
        if name == "copy_":
            target, source, blocking = *away[:2], not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            device = kwargs.get("device")
            target, source = away[0] if device is None else device.type != "cpu", away[0]
            blocking = not kwargs.get("non_blocking")
        if target == source or (not blocking and target):
            return ""
        return "copies from the host, not non_blocking" if target else "copies to the host"


def place_of(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is the user's; else of the innermost of any but torch's."""
    best = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not best and module != "torch" and frame.f_code.co_filename != __file__:
            best = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return best or "?"


def watch(trainer: Any, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run forward and backward passes of a fit in the contexts that ``make`` returns, until :func:`unwatch`."""
    watches = trainer.strategy.__dict__.setdefault(_WATCHES, [])
    if make not in watches:
        watches.append(make)
    for name, wrap in _WRAPS.items():
        wrap_method(trainer.strategy, name, wrap)


def unwatch(trainer: Any, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Undo :func:`watch`; without it nothing happens."""
    watches = trainer.strategy.__dict__.get(_WATCHES, [])
    if make in watches:
        watches.remove(make)
    for name, wrap in _WRAPS.items() if not watches else ():
        unwrap_method(trainer.strategy, name, wrap)


def _within(strategy: Any, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for make in list(strategy.__dict__.get(_WATCHES, ())):
            stack.enter_context(make())
        return inner(*args, **kwargs)


def _training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _within(self, inner_method(self, "training_step", _training_step), args, kwargs)


def _backward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _within(self, inner_method(self, "backward", _backward), args, kwargs)


_WRAPS = {"training_step": _training_step, "backward": _backward}

"""Detection of operations that make the host wait for a device: reads of a value, and copies without non_blocking.

A device works through a queue of operations. After a wait the queue is empty, and the device idles until the host has
filled the queue again.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import TorchDispatchMode, operator_of
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Operators that read from the device, and the words for them in a report.
_READS = {
    "local_scalar_dense": "reads a value",
    "equal": "compares tensors",
    "nonzero": "counts nonzero elements",
    "masked_select": "counts selected elements",
    "unique2": "counts unique elements",
}
_WATCHES = "_lit_efficient_watches"  # attribute of a strategy: functions that make contexts for its passes
_OURS = __name__.partition(".")[0]
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", _OURS)


class HostWaits(TorchDispatchMode):
    """Dispatch mode that records where the host waits for a device: ``places`` counts texts ``file:line: operation``.

    Example:
        >>> import torch
        >>> with HostWaits() as waits:
        ...     _ = torch.ones(3).sum().item()  # the tensor is on the CPU, so nothing is recorded
        >>> waits.places
        Counter()
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = operator_of(func)[1].rpartition("::")[2].lstrip("_")
        if name in _READS or name in ("to_copy", "copy_"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            description = ""
            if tensors:
                description = self._describe_wait(name, tensors, args, kwargs)
            if description:
                self.places[f"{place_of(sys._getframe(1))}: {description}"] += 1
        return func(*args, **kwargs)

    @staticmethod
    def _describe_wait(name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> str:
        """Return a description of the wait that an operator causes, or "" if it causes none."""
        on_device = [x.device.type != "cpu" for x in tensors]
        if name in _READS:
            return _READS[name] if any(on_device) else ""
        non_blocking = kwargs.get("non_blocking")
        if name == "copy_":
            to_device = on_device[0]
            from_device = on_device[1]
            if len(args) > 2:
                non_blocking = args[2]
        else:
            from_device = on_device[0]
            device = kwargs.get("device")
            to_device = from_device if device is None else device.type != "cpu"
        if to_device == from_device:
            return ""
        if not to_device:
            return "copies to the host"  # also with non_blocking, because the host will read the copy
        if non_blocking:
            return ""
        return "copies from the host without non_blocking"


def place_of(frame: FrameType | None) -> str:
    """Return file and line of the innermost frame of the user's code, or of the innermost frame outside torch."""
    fallback = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not fallback and module != "torch" and frame.f_code.co_filename != __file__:
            fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback or "?"


def watch(trainer: "Trainer", make: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the forward and backward passes of a fit in contexts made by ``make``, until :func:`unwatch` is called."""
    watches = trainer.strategy.__dict__.setdefault(_WATCHES, [])
    if make not in watches:
        watches.append(make)
    for name, wrap in _WRAPS.items():
        wrap_method(trainer.strategy, name, wrap)


def unwatch(trainer: "Trainer", make: Callable[[], AbstractContextManager[object]]) -> None:
    """Undo :func:`watch`. Does nothing if it was not called."""
    watches = trainer.strategy.__dict__.get(_WATCHES, [])
    if make in watches:
        watches.remove(make)
    if not watches:
        for name, wrap in _WRAPS.items():
            unwrap_method(trainer.strategy, name, wrap)


def _within(strategy: Any, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    with ExitStack() as stack:
        for make in list(strategy.__dict__.get(_WATCHES, ())):
            stack.enter_context(make())
        return inner(*args, **kwargs)


def _training_step(self: nn.Module, *args: object, **kwargs: object) -> Any:
    return _within(self, inner_method(self, "training_step", _training_step), args, kwargs)


def _backward(self: nn.Module, *args: object, **kwargs: object) -> Any:
    return _within(self, inner_method(self, "backward", _backward), args, kwargs)


_WRAPS = {"training_step": _training_step, "backward": _backward}

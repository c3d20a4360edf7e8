"""Activation checkpointing that can be switched off: ``torch.utils.checkpoint``. Checked with torch 2.13."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from lit_efficient.internals.wraps import temporarily


def caches_results() -> bool:
    """Return whether selective checkpointing keeps results of operators, which must not be changed in place."""
    kinds = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def without_recomputation() -> Iterator[list[str]]:
    """Context in which activation checkpointing has no effect. It yields the names of the checkpointed functions.

    It replaces ``checkpoint.CheckpointFunction`` and ``checkpoint._checkpoint_without_reentrant_generator``, which
    ``checkpoint`` calls, so that modules which imported ``checkpoint`` by name are covered too.
    """
    from torch.utils import checkpoint

    seen: list[str] = []

    class Kept:
        """Replacement of the reentrant implementation."""

        @staticmethod
        def apply(function: Callable[..., object], preserve: bool, *args: object) -> Any:
            seen.append(getattr(function, "__qualname__", type(function).__name__))
            return function(*args)

    def kept(function: Callable[..., object], *_: object, **__: object) -> Iterator[None]:
        seen.append(getattr(function, "__qualname__", type(function).__name__))
        yield

    with temporarily(checkpoint, CheckpointFunction=Kept, _checkpoint_without_reentrant_generator=kept):
        yield seen

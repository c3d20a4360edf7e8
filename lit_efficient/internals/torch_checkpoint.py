"""Checkpoints that keep what they would compute again: ``torch.utils.checkpoint``. Checked with torch 2.13."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lit_efficient.internals.wraps import temporarily


@contextmanager
def without_recomputation() -> Iterator[list[str]]:
    """Run what is under a checkpoint as if it were not; gives the names of what was run so, as it is.

    Whoever has imported ``checkpoint`` by name has it, too: ``checkpoint.CheckpointFunction`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` are what it does.
    """
    from torch.utils import checkpoint

    seen: list[str] = []

    class Kept:
        """In the place of the reentrant one."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            seen.append(getattr(function, "__qualname__", type(function).__name__))
            return function(*args)

    def kept(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        seen.append(getattr(function, "__qualname__", type(function).__name__))
        yield

    with temporarily(checkpoint, CheckpointFunction=Kept, _checkpoint_without_reentrant_generator=kept):
        yield seen

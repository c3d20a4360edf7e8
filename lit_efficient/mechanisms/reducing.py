"""The reducer of DistributedDataParallel: made anew where what trains has changed, or kept in its first order."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def renew_reducer(strategy: Any) -> None:
    """Wrap the module in a new DistributedDataParallel, which expects gradients of what requires one now.

    The old one would wait for gradients that never come, and knows nothing of parameters that were frozen when it was
    made. Other strategies need nothing.
    """
    old = strategy.model
    if not isinstance(old, DistributedDataParallel):
        return
    kept = isinstance(old.reducer, _InFirstOrder)
    del old.reducer, old.logger  # their hooks on the parameters go with them
    strategy.model = old.module
    strategy.configure_ddp()
    if kept:
        keep_order(strategy)


def keep_order(strategy: Any) -> None:
    """Let gradients travel in the buckets of the first step in all steps.

    The reducer would sort them anew after each start, by the order in which they came. Where they lie in a bucket
    decides in which order three ranks or more add them, so that a resumed run's first step would be rounded otherwise.
    """
    model = strategy.model
    if isinstance(model, DistributedDataParallel) and not isinstance(model.reducer, _InFirstOrder):
        model.reducer = _InFirstOrder(model.reducer)


class _InFirstOrder:
    """A reducer without ``_rebuild_buckets``, which is called before each forward pass."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

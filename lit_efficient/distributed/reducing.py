"""The reducer of DistributedDataParallel: made anew where what trains has changed, or kept in its first order."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lit_efficient.internals.wraps import inner_method, wrap_method


def renew_reducer(strategy: Any) -> None:
    """Wrap the module in a new DistributedDataParallel, which expects gradients of what requires one now.

    The old one would wait for gradients that never come, and knows nothing of parameters that were frozen when it was
    made. Other strategies need nothing.
    """
    old = strategy.model
    if not isinstance(old, DistributedDataParallel):
        return
    del old.reducer, old.logger  # their hooks on the parameters go with them
    strategy.model = old.module
    strategy.configure_ddp()


def keep_order(strategy: Any) -> None:
    """Let gradients travel in the buckets of the first step in all steps, whoever makes a reducer from now on.

    It would sort them anew after its first step, by the order in which they came. Where they lie in a bucket decides in
    which order three ranks or more add them, so that a resumed run's first step would be rounded otherwise.
    """
    if hasattr(strategy, "configure_ddp"):
        wrap_method(strategy, "configure_ddp", configure_in_order)


def configure_in_order(self: Any) -> None:
    """Around ``strategy.configure_ddp``."""
    inner_method(self, "configure_ddp", configure_in_order)()
    if isinstance(self.model, DistributedDataParallel):
        kept: Any = _InFirstOrder(self.model.reducer)
        self.model.reducer = kept


class _InFirstOrder:
    """A reducer without ``_rebuild_buckets``, which is called before each forward pass."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

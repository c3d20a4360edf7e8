"""Reducer of DistributedDataParallel: replaced when the trained parameters change, or kept in its first bucket
order.
"""

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from lit_efficient.internals.wraps import inner_method, wrap_method

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy


def renew_reducer(strategy: "DDPStrategy") -> None:
    """Wrap the module in a new DistributedDataParallel, which expects gradients of the parameters that require one now.

    The old reducer would wait for gradients that never come, and does not know parameters that were frozen when it was
    created. Other strategies are left unchanged.
    """
    old = strategy.model
    if not isinstance(old, DistributedDataParallel):
        return
    del old.reducer, old.logger  # their hooks on the parameters go with them
    strategy.model = old.module
    strategy.configure_ddp()


def keep_order(strategy: "DDPStrategy") -> None:
    """Keep the gradient buckets of the first step in all steps, for every reducer from now on.

    DistributedDataParallel would rebuild its buckets after the first step, in the order in which gradients came. The
    place in a bucket decides the order in which three or more ranks add their gradients, so that the first step of a
    resumed run would round differently.
    """
    if hasattr(strategy, "configure_ddp"):
        wrap_method(strategy, "configure_ddp", configure_in_order)


def configure_in_order(self: "DDPStrategy") -> None:
    """Wrap ``strategy.configure_ddp`` so that its reducer keeps its buckets."""
    inner_method(self, "configure_ddp", configure_in_order)()
    if isinstance(self.model, DistributedDataParallel):
        kept: Any = _InFirstOrder(self.model.reducer)
        self.model.reducer = kept


class _InFirstOrder:
    """Reducer without ``_rebuild_buckets``, which DistributedDataParallel calls before each forward pass."""

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

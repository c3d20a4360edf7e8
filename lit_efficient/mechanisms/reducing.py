"""The reducer of DistributedDataParallel, made anew where what trains has changed."""

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
    del old.reducer, old.logger  # their hooks on the parameters go with them
    strategy.model = old.module
    strategy.configure_ddp()

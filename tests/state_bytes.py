"""How much memory the states of an optimizer take, by looking at every tensor in them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def measure_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, shared ones once, step counters left out."""
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in _tensors(optimizer) if t.numel() > 1}.values())


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    stack: list[Any] = list(optimizer.state.values())
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif hasattr(item, "to_local"):
            stack.append(item.to_local())
        elif hasattr(item, "__tensor_flatten__"):
            stack.extend(getattr(item, name) for name in item.__tensor_flatten__()[0])
        elif isinstance(item, Tensor):
            yield item

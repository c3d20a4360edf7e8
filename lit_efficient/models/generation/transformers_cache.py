"""Cache for models of transformers whose layers keep keys and values in memory that is allocated once.

transformers' dynamic cache copies all keys and values for each token.
"""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lit_efficient.models.networks.gpt import KVCache


class HeldLayer(DynamicLayer):
    """Layer of a cache that appends to a `KVCache`.

    Args:
        window: number of tokens that a query sees. None: all.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.held = KVCache(0)
        self.window = window
        self.is_sliding = window is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return those that the new tokens may see."""
        first = self.get_mask_sizes(0)[1]
        keys, values = self.held.append(key_states, value_states)
        self.is_initialized = True
        self.keys = keys[:, :, first:]
        self.values = values[:, :, first:]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the number of the first one."""
        first = 0
        if self.window is not None:
            first = max(0, self.held.length - self.window + 1)
        return self.held.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.held.length


class HeldCache(DynamicCache):
    """Cache of :class:`HeldLayer`, and of layers that keep nothing."""

    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self.own = {*vars(self), "own"}

    def is_untouched(self, output: Any) -> bool:
        """Return whether a network used this cache, and added nothing of its own."""
        kinds = {type(layer) for layer in self.layers}
        return output.past_key_values is self and kinds <= {HeldLayer, DummyLayer} and set(vars(self)) == self.own


def cache_for(network: nn.Module) -> HeldCache | None:
    """Return an empty cache for a network.

    Returns:
        None if the network's cache has layers that keep anything else than keys and values, such as recurrent states.
    """
    layers: list[Any] = []
    for layer in DynamicCache(config=network.config).layers:  # type: ignore[arg-type]
        if type(layer) is DynamicSlidingWindowLayer:
            layers.append(HeldLayer(layer.sliding_window))
        elif type(layer) is DynamicLayer:
            layers.append(HeldLayer(None))
        elif type(layer) is DummyLayer:
            layers.append(layer)
        else:
            return None
    return HeldCache(layers) if layers else None

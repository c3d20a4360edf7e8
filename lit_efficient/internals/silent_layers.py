"""Layers whose adapters have had no gradient yet: not used so far, or bypassed by code that reads the frozen weight.

A fused kernel that reads a layer's weight, and never calls the layer, trains no adapter of it; nor does a batch of
another task. The frozen weight tells which: made to require a gradient for a while it gets one, and the adapter none.
That gradient is dropped where it arrives, so that no optimizer, norm or log sees it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class SilentLayers:
    """Listens to the gradients of some layers' adapters and weights; a copy listens to nothing.

    Args:
        who: Names the techniques that have put the adapters there.
        adapters: By a layer's name, what has had no gradient.
        weights: By the same name, the frozen parameters whose gradient would mean that the layer is bypassed.
    """

    def __init__(
        self,
        who: str,
        adapters: Mapping[str, Sequence[nn.Parameter]],
        weights: Mapping[str, Iterable[nn.Parameter]],
    ) -> None:
        self.who = who
        self.waiting = dict(adapters)
        self.steps = 1
        self._weights = {name: list(weights[name]) for name in adapters}
        self._open: list[nn.Parameter] = []
        self._learned: set[str] = set()
        self._read: set[str] = set()
        self._hooks: list[Any] = []
        for name, own in adapters.items():
            self._hooks += [_hooked(p, partial(self._learn, name)) for p in own]
            self._hooks += [_hooked(p, partial(self._was_read, name)) for p in self._weights[name]]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SilentLayers":
        return SilentLayers(self.who, {}, {})

    def listen(self) -> None:
        """Let the weights require a gradient, for a forward pass and its backward pass."""
        self._open = [p for name in self.waiting for p in self._weights[name]]
        for p in self._open:
            p.requires_grad_(True)

    def rest(self) -> None:
        """Let the weights require none, as before; not between two passes: recomputed layers must be as they were."""
        for p in self._open:
            p.requires_grad_(False)
        self._open = []

    def bypassed(self) -> list[str]:
        """The layers whose weight was read since the last call while none of their adapters had a gradient."""
        self.steps += 1
        self._learned |= {name for name, own in self.waiting.items() if any(p.grad is not None for p in own)}
        self.waiting = {name: own for name, own in self.waiting.items() if name not in self._learned}
        read, self._read = self._read, set()
        return [name for name in self.waiting if name in read]

    def close(self) -> None:
        """Hear nothing any more, and leave the parameters as they were."""
        self.rest()
        for hook in self._hooks:
            hook.remove()

    def _learn(self, name: str, _: Tensor) -> None:
        self._learned.add(name)

    def _was_read(self, name: str, weight: Tensor) -> None:
        weight.grad = None
        if all(p.requires_grad for p in self.waiting.get(name, ())):  # not in the turn of another optimizer
            self._read.add(name)


def _hooked(parameter: nn.Parameter, function: Callable[[Tensor], None]) -> Any:
    trains = parameter.requires_grad
    hook = parameter.requires_grad_(True).register_post_accumulate_grad_hook(function)
    parameter.requires_grad_(trains)
    return hook

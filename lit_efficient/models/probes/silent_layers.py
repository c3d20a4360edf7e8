"""Layers whose adapters have had no gradient yet: not used so far, or bypassed by code that reads the frozen weight.

A fused kernel that reads a layer's weight, and never calls the layer, trains no adapter of it; nor does a batch of
another task. The weight tells which: code outside of the layer gets a parameter of the same memory that requires a
gradient, and where that gets one, the loss depends on it. The layer's own stays frozen for whoever asks or copies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.models.probes.read_weights import Watched
from lit_efficient.surgery import mix_in, mix_out


class _Likes:
    """What readers of a layer's weights get instead, while the loss is computed; a copy of the layer has none."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[nn.Parameter, nn.Parameter | None]] | None = None
        self.heard: list[str] = []  # names of those that have had a gradient

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Likes, ()

    def make(self, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """One, of a frozen matrix that autograd takes as it is."""
        plain = type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.itemsize > 1
        if not plain or parameter.ndim < 2 or parameter.requires_grad:
            return None
        like = nn.Parameter(parameter.detach())
        like.register_post_accumulate_grad_hook(partial(self._hear, name))
        return like

    def _hear(self, name: str, like: Tensor) -> None:
        self.heard.append(name)
        like.grad = None


class _Watched(Watched):
    silent_likes: _Likes = _Likes()

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        likes = self.silent_likes
        if not torch.is_grad_enabled() or (likes.by_name is None and not backward_runs()):
            return parameter  # but a block that is recomputed in the backward pass must be as it was
        own, like = (likes.by_name or {}).get(name, (None, None))  # made before, as no compiler makes one
        like = like if own is parameter else likes.make(name, parameter)  # of what stands there for now: a whole shard
        return parameter if like is None else like


class SilentLayers:
    """Watches layers, by name, until one of their adapters, which ``who`` has put there, has had a gradient."""

    def __init__(
        self, who: str, adapters: Mapping[str, Sequence[nn.Parameter]], layers: Mapping[str, nn.Module]
    ) -> None:
        self.who = who
        self.waiting = dict(adapters)
        self.steps = 1
        self._layers: dict[str, Any] = dict(layers)
        for layer in layers.values():
            mix_in(layer, _Watched, silent_likes=_Likes())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the loss is computed."""
        for layer in self._layers.values():
            likes = layer.silent_likes
            likes.by_name = {n: (p, likes.make(n, p)) for n, p in layer.named_parameters(recurse=False)}
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.silent_likes.by_name = None

    def check(self, taken: Collection[Tensor] = ()) -> None:
        """After a step: forget layers that learn, and refuse those whose weights were read and that do not.

        ``taken`` had a gradient which is not there any more.

        Raises:
            ConfigurationError: Naming the first of them.
        """
        self.steps += 1
        learns = {name for name, own in self.waiting.items() if any(p.grad is not None or p in taken for p in own)}
        self.waiting = {name: own for name, own in self.waiting.items() if name not in learns}
        bypassed = [name for name, layer in self._layers.items() if name in self.waiting and layer.silent_likes.heard]
        for layer in self._layers.values():
            layer.silent_likes.heard.clear()
        for name in self._layers.keys() - self.waiting.keys():
            unwatch(self._layers.pop(name))
        if bypassed:
            raise ConfigurationError(
                f"{self.who}: {len(bypassed)} adapters cannot learn, first that of {bypassed[0]!r}: the network reads "
                "that layer's weight and never calls the layer, as fused kernels do. Leave it out of targets"
            )

    def described(self) -> str:
        """Which layers are waiting."""
        names = list(self.waiting)
        return (
            f"{self.who}: {len(names)} adapters had no gradient up to step {self.steps}: {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}. No batch has trained these layers yet; if none will, "
            "leave them out of targets"
        )


def unwatch(root: nn.Module) -> None:
    """Leave all layers in ``root`` as they were before they were watched."""
    for part in root.modules():
        if isinstance(part, _Watched):
            mix_out(part, _Watched)
            part.__dict__.pop("silent_likes", None)

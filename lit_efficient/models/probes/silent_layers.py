"""Adapters without a gradient so far: their layers were not used yet, or other code reads the frozen weight directly.

A fused kernel that reads a layer's weight and never calls the layer does not train the layer's adapter. Neither does a
batch of another task. To tell them apart, code outside of the layer receives a stand-in parameter that shares the
weight's memory and requires a gradient. If the stand-in gets a gradient, the loss depends on the weight. The layer's
own parameter stays frozen, also in copies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.surgery import mix_in, mix_out


class Watched(nn.Module):
    """Mix-in of a layer that notices when code outside of its own forward reads one of its parameters."""

    _runs: bool = False  # whether the layer's own forward runs

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that other code receives in the place of ``parameter``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if self._runs or not isinstance(value, nn.Parameter):
            return value
        return self.read_elsewhere(name, value)

    def forward(self, *args: object, **kwargs: object) -> Any:
        self.__dict__["_runs"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_runs"] = False


class _StandIns:
    """Stand-ins for the weights of a layer, while the loss is computed. A copy of the layer starts without any."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[nn.Parameter, nn.Parameter | None]] | None = None
        self.with_gradient: list[str] = []  # names of stand-ins that have had a gradient

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _StandIns, ()

    def make(self, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return a stand-in for a frozen matrix, or ``None`` if autograd does not support its class or format."""
        plain = type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.itemsize > 1
        if not plain or parameter.ndim < 2 or parameter.requires_grad:
            return None
        like = nn.Parameter(parameter.detach())
        like.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
        return like

    def _note_gradient(self, name: str, like: Tensor) -> None:
        self.with_gradient.append(name)
        like.grad = None


class _Watched(Watched):
    silent_stand_ins: _StandIns = _StandIns()

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        stand_ins = self.silent_stand_ins
        # A block that is recomputed in the backward pass must see stand-ins as in its first forward pass.
        if not torch.is_grad_enabled() or (stand_ins.by_name is None and not backward_runs()):
            return parameter
        # Stand-ins are made before the forward pass, because compiled code cannot make them.
        own, like = (stand_ins.by_name or {}).get(name, (None, None))
        if own is not parameter:  # FSDP2 has put a gathered weight in the place of the shard, or a block is recomputed
            like = stand_ins.make(name, parameter)
        return parameter if like is None else like


class SilentLayers:
    """Observes layers until one of their adapters has had a gradient.

    Args:
        who: Name of the technique that added the adapters, for messages.
        adapters: Parameters of the adapters, by name of the layer.
        layers: The layers, by name.
    """

    def __init__(
        self, who: str, adapters: Mapping[str, Sequence[nn.Parameter]], layers: Mapping[str, nn.Module]
    ) -> None:
        self.who = who
        self.waiting = dict(adapters)
        self.steps = 1
        self._layers: dict[str, Any] = dict(layers)
        for layer in layers.values():
            mix_in(layer, _Watched, silent_stand_ins=_StandIns())

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Give code outside of the layers stand-ins for their weights in this context, in which the loss is
        computed.
        """
        for layer in self._layers.values():
            own = dict(layer.named_parameters(recurse=False))
            stand_ins = layer.silent_stand_ins
            stand_ins.by_name = {name: (p, stand_ins.make(name, p)) for name, p in own.items()}
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.silent_stand_ins.by_name = None

    def check(self, taken: Collection[Tensor] = ()) -> None:
        """Drop layers whose adapters have a gradient, after a step, and refuse layers whose weights were read without
        one.

        Args:
            taken: Parameters that had a gradient which has been freed.

        Raises:
            ConfigurationError: Naming the first of the refused layers.
        """
        self.steps += 1
        learns = {name for name, own in self.waiting.items() if any(p.grad is not None or p in taken for p in own)}
        self.waiting = {name: own for name, own in self.waiting.items() if name not in learns}
        read = [name for name, layer in self._layers.items() if layer.silent_stand_ins.with_gradient]
        bypassed = [name for name in read if name in self.waiting]
        for layer in self._layers.values():
            layer.silent_stand_ins.with_gradient.clear()
        for name in self._layers.keys() - self.waiting.keys():
            unwatch(self._layers.pop(name))
        if bypassed:
            raise ConfigurationError(
                f"{self.who}: {len(bypassed)} adapters cannot learn, first that of {bypassed[0]!r}: the network reads "
                "that layer's weight and never calls the layer, as fused kernels do. Leave it out of targets"
            )

    def message(self) -> str:
        """Return a message that lists the layers without a gradient so far."""
        names = list(self.waiting)
        return (
            f"{self.who}: {len(names)} adapters had no gradient up to step {self.steps}: {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}. No batch has trained these layers yet; if none will, "
            "leave them out of targets"
        )


def unwatch(root: nn.Module) -> None:
    """Remove the observation from all layers in ``root``."""
    for part in root.modules():
        if isinstance(part, _Watched):
            mix_out(part, _Watched)
            part.__dict__.pop("silent_stand_ins", None)

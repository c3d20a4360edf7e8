"""Contexts in which a network evaluates or runs without its deep path or with other weights, and its precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_efficient.errors import ConfigurationError


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the body with ``module`` and all its submodules in eval mode.

    The mode of each submodule is restored by itself. ``module.train(was_training)`` would also put parts into training
    mode that were kept in eval mode, such as a frozen batch norm.
    """
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def call_with(network: nn.Module, tensors: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
    """Call ``function`` while parameters of a network have other values, given by name."""
    return functional_call(_Call(network, function), {f"network.{name}": one for name, one in tensors.items()}, ())


class _Call(nn.Module):
    """Module that calls a function of a network, for ``functional_call``."""

    def __init__(self, network: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.network = network
        self.function = function

    def forward(self) -> Any:
        return self.function()


@contextmanager
def trial_of_layer(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the body, the trial of a layer, with gradients and without autocast.

    Random states and the layer's buffers are restored: batch norms and spectral norms change theirs in each forward.
    """
    autocast = nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
    buffers = [(part, name, b, b.clone()) for part in layer.modules() for name, b in part.named_buffers(recurse=False)]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad(), autocast:
            yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in buffers:
                setattr(part, name, buffer.copy_(value))


def whole_precision(module: nn.Module, device: torch.device) -> bool:
    """Return whether ``module`` computes in float32 or more: no weight has fewer bits, and autocast is off."""
    return not torch.is_autocast_enabled(device.type) and whole_weights(module.parameters())


def whole_weights(weights: Iterable[Tensor]) -> bool:
    """Return whether no weight has fewer bits than float32."""
    return {weight.dtype for weight in weights} <= {torch.float32, torch.float64}


def deep_path(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network that it has learned to do without: those with a ``path_left_out`` that is not
    None.

    Raises:
        ConfigurationError: If there are none.
    """
    found = [part for part in network.modules() if getattr(part, "path_left_out", None) is not None]
    if not found:
        raise ConfigurationError(
            "Sampler: path_drop guides with the network without its deep path, and this network was not trained to run "
            "without it: train it with a technique that has a path_drop above 0, or leave path_drop false"
        )
    return found


@contextmanager
def path_dropped(network: nn.Module) -> Iterator[None]:
    """Run the body without the blocks of the network's :func:`deep_path`."""
    blocks: list[Any] = deep_path(network)
    for block in blocks:
        block.path_left_out = True
    try:
        yield
    finally:
        for block in blocks:
            block.path_left_out = False

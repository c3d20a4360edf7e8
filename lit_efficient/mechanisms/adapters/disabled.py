"""Temporarily disabled adapters: the network computes the output of its base, without a second copy in memory.

This holds for PiSSA as well, because it does not change the weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lit_efficient.internals.torch_modules import StaysFloat32


class Switchable(StaysFloat32):
    """Mix-in of a module with an adapter that can be disabled, and that is not cast with the module."""

    adapter_off: bool = False


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Context in which all adapters in ``module`` (LoRA of any variant, IA3, prefixes) are disabled.

    Modules that train in full together with adapters (``modules_to_save``, biases) keep their trained weights, because
    their original ones are not stored. Contexts may be nested. Adapters are enabled again after an error.
    """
    # Adapters that are already disabled belong to an outer context.
    parts = [part for part in module.modules() if isinstance(part, Switchable) and not part.adapter_off]
    try:
        for part in parts:
            part.adapter_off = True
        yield
    finally:
        for part in parts:
            del part.adapter_off


def has_adapters(module: nn.Module) -> bool:
    """Return whether a module has adapters that :func:`disabled` can disable."""
    return any(isinstance(part, Switchable) for part in module.modules())

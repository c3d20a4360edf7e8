"""Adapters off for a moment: the network computes what its base does, without a second one in memory.

Of PiSSA that is the original weight, too: what it took from the weight is subtracted beside it, not in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lit_efficient.internals.torch_modules import StaysFloat32


class Switchable(StaysFloat32):
    """Mix-in of a module with an adapter that can be passed over, and that is not cast with its base."""

    adapter_off: bool = False


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Run the body with all adapters in ``module`` (LoRA of any variant, IA3, prefixes) off.

    Modules that train in full beside adapters (``modules_to_save``, biases) have no other weights to go back to: they
    stay as they are. Without adapters nothing happens. Contexts may be nested; adapters are on again after an error.
    """
    # Those that are off already belong to a context around this one.
    parts = [part for part in module.modules() if isinstance(part, Switchable) and not part.adapter_off]
    try:
        for part in parts:
            part.adapter_off = True
        yield
    finally:
        for part in parts:
            del part.adapter_off


def has_adapters(module: nn.Module) -> bool:
    """Whether there is anything that :func:`disabled` would turn off."""
    return any(isinstance(part, Switchable) for part in module.modules())

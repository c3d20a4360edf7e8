"""Layers that peft has put into a network: the base's own names of their parameters, disabling, and removal.

    net.up.weight  ->  net.up.base_layer.weight,  net.up.lokr_w1.default,  ...

peft wraps a layer, or a module that trains in full together with adapters, and the wrapper contains the original. The
names of the base are derived from the modules of the network, so that they are also right for copies and submodules.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.disabled import Switchable

NOTE = "_lit_efficient_peft"  # attribute of a network with such layers: seed, active adapters and shared tensors
_WRAPPED = ("base_layer", "original_module")  # peft's names of the original in an adapted layer and a saved module


class PeftLayer(Switchable):
    """Mix-in of each of peft's layers and saved modules, whose adapters stay in float32.

    A full copy of the wrapped module is cast with the network, because it computes in place of the wrapped module.
    """

    float32 = ("",)
    one_layer = True
    named_parameters: Any
    named_buffers: Any
    enable_adapters: Any
    disable_adapters: Any

    @property
    def adapter_off(self) -> bool:
        return bool(self.disable_adapters)

    @adapter_off.setter
    def adapter_off(self, off: bool) -> None:
        self._switch(on=not off)

    @adapter_off.deleter
    def adapter_off(self) -> None:
        self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        trained = [(parameter, parameter.requires_grad) for parameter in self.parameters()]  # type: ignore[attr-defined]
        self.enable_adapters(on)  # this also changes requires_grad
        for parameter, required in trained:
            parameter.requires_grad_(required)

    def _named(self) -> list[tuple[str, Tensor]]:
        copies = self._copies()
        named = [(name, tensor) for name, tensor in super()._named() if not name.startswith(copies)]
        return [(name, tensor) for name, tensor in named if not {*_WRAPPED} & {*name.split(".")}]

    def _copies(self) -> tuple[str, ...]:
        """Return the prefixes of the names of parameters in full copies of the wrapped module."""
        module: Any = self
        wrapped = next(part for name, part in module.named_children() if name in _WRAPPED)
        own = _shapes(wrapped)
        return tuple(f"{name}." for name, part in module.named_modules() if name and _shapes(part) == own)


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def peft_names(module: nn.Module, names: Iterable[str]) -> tuple[set[str], dict[str, str]]:
    """Return the names that belong to peft's adapters, and the original names of the base's parameters.

    Args:
        module: Any module.
        names: Names in its ``state_dict``.

    Returns:
        The names of adapters, and a mapping from each name that peft has changed to the original name.
    """
    layers = {name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, PeftLayer)}
    added: set[str] = set()
    moved: dict[str, str] = {}
    if not layers:
        return added, moved
    for name in names:
        path = ""
        kept = []  # the components of the original name
        inside = False
        is_adapter = False
        for piece in name.split("."):
            if path in layers:
                inside = True
                is_adapter = piece not in _WRAPPED
            if path not in layers or is_adapter:
                kept.append(piece)
            path = f"{path}.{piece}".lstrip(".")
        if is_adapter:
            added.add(name)
        elif inside:
            moved[name] = ".".join(kept)
    return added, moved


def plain_name(name: str) -> str:
    """Return the base's own name of a checkpoint's entry, without knowledge of the module."""
    return ".".join(piece for piece in name.split(".") if piece not in _WRAPPED)


def outermost(root: nn.Module) -> list[str]:
    """Return the names of peft's layers in a network that are not inside another of peft's layers."""
    found: list[str] = []
    for name, part in root.named_modules():
        if isinstance(part, PeftLayer) and not any(name.startswith(f"{one}.") for one in found):
            found.append(name)
    return found


def unload(root: nn.Module, *, merge: bool) -> None:
    """Replace peft's layers in a network by the layers that they wrap, in place.

    Args:
        root: The network.
        merge: Merge the active adapters into the weights.
    """
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        if hasattr(layer, "unload_and_optionally_merge_module"):  # this class of peft does both steps itself
            plain = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
        else:
            if merge:
                layer.merge()
            plain = layer.get_base_layer()
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, plain)
    root.__dict__.pop("peft_config", None)


def networks(module: nn.Module) -> list[nn.Module]:
    """Return the networks in a module into which this package has put peft's layers."""
    return [part for part in module.modules() if NOTE in part.__dict__]

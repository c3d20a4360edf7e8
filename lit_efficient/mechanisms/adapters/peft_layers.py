"""Layers that peft itself has put into a network: what of their names is the base's, off for a moment, taken out.

    net.up.weight  ->  net.up.base_layer.weight,  net.up.lokr_w1.default,  ...

Peft wraps a layer (or a module that trains in full beside adapters) and keeps what it wrapped inside. Which names are
the base's is read off the network as it stands, so that it holds in copies and for any part of it.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.disabled import Switchable

NOTE = "_lit_efficient_peft"  # on a network that has got such layers: what to know of them
_WRAPPED = ("base_layer", "original_module")  # what peft calls the module inside a layer, and inside a saved module


class PeftLayer(Switchable):
    """Mixed in front of each of peft's layers and saved modules; tensors stay in float32, but those of whole copies."""

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
        self.enable_adapters(on)  # which decides anew what requires a gradient
        for parameter, required in trained:
            parameter.requires_grad_(required)

    def _named(self) -> list[tuple[str, Tensor]]:
        copies = self._copies()
        named = [(name, tensor) for name, tensor in super()._named() if not name.startswith(copies)]
        return [(name, tensor) for name, tensor in named if not {*_WRAPPED} & {*name.split(".")}]

    def _copies(self) -> tuple[str, ...]:
        """Beginnings of names in copies of the wrapped module, which compute in its place and so in its type."""
        module: Any = self
        wrapped = next(part for name, part in module.named_children() if name in _WRAPPED)
        own = _shapes(wrapped)
        return tuple(f"{name}." for name, part in module.named_modules() if name and _shapes(part) == own)


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def peft_names(module: nn.Module, names: Iterable[str]) -> tuple[set[str], dict[str, str]]:
    """Of the names in a module's ``state_dict`` those that are adapters', and those of the base that peft has moved,
    with the old ones.
    """
    layers = {name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, PeftLayer)}
    added: set[str] = set()
    moved: dict[str, str] = {}
    for name in names if layers else ():
        path, kept, inside, is_adapter = "", [], False, False
        for piece in name.split("."):
            if path in layers:
                inside, is_adapter = True, piece not in _WRAPPED
            if path not in layers or is_adapter:
                kept.append(piece)
            path = f"{path}.{piece}".lstrip(".")
        if is_adapter:
            added.add(name)
        elif inside:
            moved[name] = ".".join(kept)
    return added, moved


def plain_name(name: str) -> str:
    """The base's own name for an entry of a checkpoint, of whose module no more is known."""
    return ".".join(piece for piece in name.split(".") if piece not in _WRAPPED)


def outermost(root: nn.Module) -> list[str]:
    """Names of peft's layers in a network that are in no other one of them."""
    found: list[str] = []
    for name, part in root.named_modules():
        if isinstance(part, PeftLayer) and not any(name.startswith(f"{one}.") for one in found):
            found.append(name)
    return found


def unload(root: nn.Module, *, merge: bool) -> None:
    """Take peft's layers out of a network, in place, with or without folding the active adapters into the weights."""
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        if hasattr(layer, "unload_and_optionally_merge_module"):  # it has a way of its own
            plain = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
        else:
            if merge:
                layer.merge()
            plain = layer.get_base_layer()
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, plain)
    root.__dict__.pop("peft_config", None)


def networks(module: nn.Module) -> list[nn.Module]:
    """The networks in a module that have got peft's layers."""
    return [part for part in module.modules() if NOTE in part.__dict__]

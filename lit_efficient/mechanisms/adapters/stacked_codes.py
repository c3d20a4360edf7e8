"""Stacked matrices of experts in 4 bits, which are floats only while the module that reads them runs.

    W [E, ...] is replaced by a layer ``Stack4bit`` of the same name;  forward: W = dequantised codes (+ s B A)

The module's own forward reads the sum in place of the parameter, so that routing, kernels and biases do not change.
Autograd stores which weight an operation needs instead of the weight. The backward pass dequantises it again.
Saves: between layers and between the two passes, all but the codes
Costs: dequantisation in each forward and backward pass; while a layer runs, the float weights of its experts
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_efficient.internals.torch_dispatch import saving_hooks, storage_id
from lit_efficient.internals.torch_modules import Loads, tensor_tables
from lit_efficient.mechanisms.adapters.experts import ReadsOthers
from lit_efficient.mechanisms.adapters.quantized import dequantize, plain_layer
from lit_efficient.mechanisms.blocks.side_copies import Place, place_of
from lit_efficient.surgery import in_autocast_dtype, mix_in, mix_out

Make = Callable[[], Tensor]


class ReadsCodes(Loads, ReadsOthers):
    """Mix-in of a module some of whose parameters have become layers ``Stack4bit``, and are tensors while it runs."""

    quant_order: tuple[str, ...]  # names of the parameters before quantisation; peft depends on their order

    @property
    def quant_stacks(self) -> list[str]:
        """Names of the quantised parameters."""
        module: Any = self
        layers = dict(module.named_children())
        return [name for name in self.quant_order if name in layers]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own output with the dequantised weights, in the dtype of the input or of autocast."""
        floats = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        dtype = in_autocast_dtype(next(floats)).dtype
        makes = {name: self.maker(name, dtype) for name in self.quant_stacks}
        weights = {name: make() for name, make in makes.items()}
        with self.reading(weights), saved_again({weights[name]: make for name, make in makes.items()}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def maker(self, name: str, dtype: torch.dtype) -> Make:
        """Return a function that computes the weight ``name``."""
        return partial(self._dense, name, dtype)

    def _dense(self, name: str, dtype: torch.dtype) -> Tensor:
        return dequantize(getattr(self, name)).to(dtype)

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Pass float weights of a checkpoint to the layers that hold the codes."""
        for name in self.quant_stacks:
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}{name}.weight"] = state_dict.pop(f"{prefix}{name}")


class _Again:
    """A weight that the backward pass computes again, once for all operations of a forward pass that need it."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.uses = 0  # of the weight that the backward pass has not had
        self.weight: Tensor | None = None

    def at(self, place: Place) -> Tensor:
        if self.weight is None:
            with torch.no_grad():
                self.weight = self.make()
        weight = self.weight
        self.uses -= 1
        if self.uses <= 0:
            self.weight = None
        return place.view(weight)


def saved_again(makes: Mapping[Tensor, Make]) -> saved_tensors_hooks:
    """Return a context in which autograd does not store given tensors or views of them, but computes them again.

    Other tensors are passed to the hooks around the context, such as those of recomputation and offloading.

    Args:
        makes: For each tensor the function that computes it, with the same result and layout.
    """
    known = {storage_id(weight.untyped_storage()): _Again(make) for weight, make in makes.items()}
    around = saving_hooks()

    def pack(tensor: Tensor) -> Any:
        again = None
        if tensor.layout is torch.strided:
            again = known.get(storage_id(tensor.untyped_storage()))
        if again is None:
            return None, (around[0](tensor) if around else tensor.detach())
        again.uses += 1
        return again, place_of(tensor)

    def unpack(packed: Any) -> Tensor:
        again, rest = packed
        if again is not None:
            weight: Tensor = again.at(rest)
            return weight
        return around[1](rest) if around else rest

    return saved_tensors_hooks(pack, unpack)


def quantize_stack(module: nn.Module, key: str, format: str, double_quant: bool, device: Any = None) -> Any:
    """Replace the stacked parameter ``key`` of a module by its codes, in place, and return the layer that holds them.

    Args:
        module: Module whose forward reads the parameter.
        key: Name of the parameter, [E, ...].
        format: ``nf4`` or ``fp4``.
        double_quant: Quantise the scales as well.
        device: Device on which the weight is rounded, or None for its own. The codes are on its own device.
    """
    from lit_efficient.mechanisms.adapters.bitsandbytes_layers import Stack4bit

    weight: Tensor = getattr(module, key).detach()
    rounded = weight if device is None or weight.is_meta else weight.to(device)
    layer = Stack4bit(rounded, format, double_quant).to(weight.device)
    if not isinstance(module, ReadsCodes):
        mix_in(module, ReadsCodes, quant_order=tuple(tensor_tables(module)[0]))
    delattr(module, key)
    setattr(module, key, layer)
    return layer


def dequantize_stacks(module: Any, dtype: torch.dtype | None) -> None:
    """Replace codes by the float parameters that they stand for, in place, in ``dtype`` or the format of the base."""
    for name in module.quant_stacks:  # those that no merged adapter has replaced
        layer = getattr(module, name)
        setattr(module, name, plain_layer(layer, dequantize(layer).to(dtype)))
    table = tensor_tables(module)[0]
    for name in module.quant_order:
        table[name] = table.pop(name)
    mix_out(module, ReadsCodes)
    del module.quant_order

"""Low-rank adapters of the stacked matrices of experts, and of modules whose own code reads the weight.

    W_e + s B_e A_e for each expert e,    A [E, r, in],  B [E, out, r],    s = alpha / r, or alpha / sqrt(r)

The module's own forward runs and reads the sum in place of the weight, so that routing, kernels and biases do not
change. The factors of ``down_proj`` are the parameters ``lora_A_down_proj`` and ``lora_B_down_proj`` of the module.
Modules that multiply from the right (``is_transposed``) have weights [E, in, out]. The sum is as large as the weight
and is stored for the backward pass, unless the weight is quantised (see
:mod:`lit_efficient.mechanisms.adapters.stacked_codes`).
Source: the ``target_parameters`` of https://huggingface.co/docs/peft/package_reference/lora
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.adapters.disabled import Switchable
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_quantized, is_stack, plain_layer
from lit_efficient.models.networks.grouped_linear import GroupedLayer
from lit_efficient.surgery import home_of, mix_in, mix_out


class ReadsOthers:
    """Mix-in of a module that can temporarily read other tensors in place of some of its parameters."""

    _read_now: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Any:
        now = self.__dict__.get("_read_now")
        if now is not None and name in now:
            return now[name]
        return super().__getattr__(name)  # type: ignore[misc]

    @contextmanager
    def reading(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the attributes named in ``weights`` have the given values. Contexts may be nested."""
        before = self.__dict__.get("_read_now")
        self.__dict__["_read_now"] = {**(before or {}), **weights}
        try:
            yield
        finally:
            if before is None:
                del self.__dict__["_read_now"]
            else:
                self.__dict__["_read_now"] = before


class ReadsAdapted(ReadsOthers, Switchable):
    """Mix-in of a module that reads the sum of a weight and its adapter in place of the weight."""


class LowRankExperts(ReadsAdapted):
    """Mix-in of stacked experts with an adapter for each expert. It precedes the module's own class."""

    float32 = ("lora_",)
    lora_names: tuple[str, ...]
    lora_scale: float
    lora_transposed: bool

    def forward(self, *args: Any, **kwargs: object) -> Any:
        """Return the module's own output with the adapted weights."""
        if self.adapter_off:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(self, GroupedLayer):
            return self._beside(*args)
        floats = [name for name in self.lora_names if not is_stack(getattr(self, name))]
        with self.reading({name: self.adapted(name) for name in floats}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def maker(self, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Return a function that computes the sum of a dequantised weight and its adapters."""
        make: Callable[[], Tensor] = super().maker(name, dtype)  # type: ignore[misc]  # of ReadsCodes
        if self.adapter_off or name not in self.lora_names:
            return make
        return lambda: self._summed(name, make())

    def _summed(self, name: str, weight: Tensor) -> Tensor:
        """Add the adapters to a weight, in place. They are rounded to its dtype first, as autocast does."""
        a, b = (getattr(self, f"lora_{factor}_{name}").to(weight.dtype) for factor in "AB")
        if self.lora_transposed:
            return weight.baddbmm_(a.mT, b.mT, alpha=self.lora_scale)
        return weight.baddbmm_(b, a, alpha=self.lora_scale)

    def adapted(self, name: str) -> Tensor:
        """Return the sum of the weight ``name`` and its adapters, in the weight's shape."""
        weight = getattr(self, name)
        if is_quantized(self):
            weight = self.dense_weight()
        elif is_stack(weight):
            return self._summed(name, dequantize(weight).to(getattr(self, f"lora_A_{name}").dtype))
        delta = self.lora_scale * (getattr(self, f"lora_B_{name}") @ getattr(self, f"lora_A_{name}"))
        if self.lora_transposed:
            delta = delta.mT
        return weight + delta.to(weight.dtype)

    def _beside(self, x: Tensor) -> Tensor:
        """Return the output of this package's layer of experts, computed without a sum as large as the weight."""
        y: Tensor = super().forward(x)  # type: ignore[misc]
        inner = self.grouped_product(x.to(self.lora_A_weight.dtype), self.lora_A_weight)
        return y + (self.lora_scale * self.grouped_product(inner, self.lora_B_weight)).to(y.dtype)


def seed_of(draw: str) -> int:
    """Return the seed of an adapter's initial values, which depends on the text only and is equal on all ranks."""
    return int.from_bytes(hashlib.blake2b(draw.encode(), digest_size=8).digest(), "little") >> 1


def add_experts(
    module: nn.Module, name: str, parameters: Sequence[str], *, rank: int, scale: float, seed: int = 0
) -> None:
    """Add an adapter to each matrix in a module's stacked parameters, in place. The output does not change.

    Args:
        module: Module with the stacked weights [E, out, in], or [E, in, out] if it has a true ``is_transposed``.
        name: Dotted name of the module, which determines the initial values together with ``seed``.
        parameters: Names of the stacked weights.
        rank: ``r``.
        scale: ``s``.
        seed: Seed of the initial values.
    """
    transposed = bool(getattr(module, "is_transposed", False))
    generator = torch.Generator().manual_seed(seed_of(f"{seed}/{name}"))
    for key in parameters:
        weight = getattr(module, key)
        shape = getattr(module, "expert_shape", weight.shape)
        experts, outputs, inputs = shape
        if transposed:
            experts, inputs, outputs = shape
        dtype = torch.promote_types(weight.dtype, torch.float32)
        home = home_of(weight.weight if is_stack(weight) else weight)
        drawn = torch.rand(experts, rank, inputs, generator=generator, device="cpu", dtype=torch.float32)
        a = (drawn * 2 - 1) / inputs**0.5
        b = torch.zeros(experts, outputs, rank, dtype=dtype, device=home)
        module.register_parameter(f"lora_A_{key}", nn.Parameter(a.to(home, dtype)))
        module.register_parameter(f"lora_B_{key}", nn.Parameter(b))
    mix_in(module, LowRankExperts, lora_names=tuple(parameters), lora_scale=scale, lora_transposed=transposed)


@torch.no_grad()
def fold_experts(module: Any, dtype: torch.dtype | None = None) -> None:
    """Add the adapters to the weights, and remove the adapters from the module, in place.

    Codes become floats, in ``dtype`` or the format of the adapters.
    """
    for name in module.lora_names:
        layer = getattr(module, name)
        if is_stack(layer):
            setattr(module, name, plain_layer(layer, module.adapted(name).to(dtype)))
        else:
            layer.copy_(module.adapted(name))
        for factor in ("A", "B"):
            delattr(module, f"lora_{factor}_{name}")
    mix_out(module, LowRankExperts)
    for name in ("lora_names", "lora_scale", "lora_transposed"):
        delattr(module, name)

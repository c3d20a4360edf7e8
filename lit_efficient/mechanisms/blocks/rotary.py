"""Rotary position embeddings by a fused kernel, in place of the function that a layer's forward calls for them.

That function is identified by its results on test inputs. It takes queries, keys, cosines and sines (Llama and similar
networks), or either queries or keys and a table (our GPT). Liger's kernel rotates in place. It gets copies here, so
that no other tensors change, forward or backward. torch.compile makes kernels of the function itself.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_compiler import compiled_once
from lit_efficient.surgery import unmixed

# Sizes of the test inputs.
_HEADS = 2
_LENGTH = 3
_WIDTH = 8


class Turns(nn.Module):
    """Mix-in that runs a layer's own forward with fused kernels in place of the rotation functions."""

    _fused_turns: dict[str, str]  # names of functions -> "both" or "one" by Liger's kernel, or "compiled"

    def forward(self, *args: object, **kwargs: object) -> Any:
        kind: Any = unmixed(self)
        own = kind.forward
        if torch.compiler.is_compiling():  # the compiler fuses the rotation by itself
            return own(self, *args, **kwargs)
        names = {name: _KINDS[kind](own.__globals__[name]) for name, kind in self._fused_turns.items()}
        fused = FunctionType(own.__code__, own.__globals__ | names, own.__name__, own.__defaults__, own.__closure__)
        fused.__kwdefaults__ = own.__kwdefaults__
        return fused(self, *args, **kwargs)


def turns_of(layer: nn.Module, device: torch.device, compiles: bool = False) -> dict[str, str]:
    """Return the rotation functions that a layer's forward calls, for :class:`Turns`: their kinds by their names.

    Args:
        layer: The layer.
        device: Device on which Liger's kernel is tried.
        compiles: Whether functions are to be compiled, and Liger's kernel is not tried.
    """
    layer_class: Any = unmixed(layer)
    forward = layer_class.forward
    if not isinstance(forward, FunctionType):
        return {}
    kinds: dict[str, str] = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        for kind in ("both", "one"):
            if _turns(function, kind, device, compiles):
                kinds[name] = "compiled" if compiles else kind
                break
    return kinds


def _turns(function: Any, kind: str, device: torch.device, compiles: bool) -> bool:
    """Return whether a function computes the rotation, and Liger's kernel the same values and gradients."""
    if not callable(function) or isinstance(function, type):
        return False
    made = torch.Generator().manual_seed(0)
    angle = torch.randn(1, _LENGTH, _WIDTH // 2, generator=made, device="cpu").to(device)
    x, weight = torch.randn(2, 1, _HEADS, _LENGTH, _WIDTH, generator=made, device="cpu").to(device).unbind()
    x.requires_grad_()
    angles = torch.cat((angle, angle), dim=-1)
    cos = angles.cos()
    sin = angles.sin()
    a, b = x.chunk(2, dim=-1)
    expected = x * cos + torch.cat((-b, a), dim=-1) * sin
    arguments: tuple[Any, ...] = (x, x, cos, sin)
    tensors_returned = 2
    if kind == "one":
        arguments = (x, torch.stack((cos, torch.cat((-angle.sin(), angle.sin()), dim=-1)), dim=1))
        tensors_returned = 1
    try:
        first_gradient: Tensor | None = None
        for candidate in (function,) if compiles else (function, _KINDS[kind](function)):
            output = candidate(*arguments)
            tensors = (output,) if isinstance(output, Tensor) else tuple(output)
            if len(tensors) != tensors_returned:
                return False
            for tensor in tensors:
                gradient = torch.autograd.grad((tensor * weight).sum(), x, retain_graph=True)[0]
                if first_gradient is None:
                    first_gradient = gradient
                if not torch.allclose(tensor, expected, atol=1e-5):
                    return False
                if not torch.allclose(gradient, first_gradient, atol=1e-5):
                    return False
        return True
    except Exception:  # a function with other arguments may raise anything
        return False


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, query: Tensor, key: Tensor) -> Any:
        from liger_kernel.ops.rope import rope_forward

        turned = rope_forward(_copied(query), _copied(key), cos, sin)
        ctx.save_for_backward(*turned[2:])
        return turned[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> object:
        from liger_kernel.ops.rope import rope_backward

        return None, None, *rope_backward(*map(_copied, gradients), *ctx.saved_tensors)[:2]


def _copied(x: Tensor) -> Tensor:
    """Return a copy in the kernel's memory layout, in which the heads of a token are contiguous."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _both(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function of queries, keys, cosines and sines that uses Liger's kernel for the shapes it supports."""

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object) -> object:
        usual = not args and not kwargs and query.ndim == key.ndim == 4 and cos.ndim == sin.ndim == 3
        if usual and cos.shape[-1] == query.shape[-1] == key.shape[-1] and cos.dtype == query.dtype == key.dtype:
            return _Turn.apply(cos, sin, query, key)
        return function(query, key, cos, sin, *args, **kwargs)

    return turn


def _one(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function of queries or keys and the table of our GPT, ``[B, 2, (1,) T, width]``, for Liger's kernel."""

    def turn(x: Tensor, table: Tensor) -> object:
        cos, sin = (values.flatten(0, -3) for values in table.to(x.dtype).unbind(1))
        sin = sin.roll(sin.shape[-1] // 2, -1)  # the kernel reads the first half, where this table has -sin
        return _Turn.apply(cos, sin, x, x[:, :1].detach())[0]

    return turn


_KINDS: dict[str, Callable[..., Any]] = {"both": _both, "one": _one, "compiled": compiled_once}

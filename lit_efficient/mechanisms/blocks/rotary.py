"""Rotary positions by Liger's kernel, in the place of the function that a layer's own forward calls for them.

Which function that is, is asked of the functions, by their numbers: of queries, keys, cosines and sines (Llama and what
follows it), or of one of the two and a table (our GPT). The kernel turns in place; here it is given copies, so that
nobody else's tensors change, forward or backward.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.surgery import unmixed

_HEADS, _LENGTH, _WIDTH = 2, 3, 8  # of the tensors that functions are tried on


class Turns(nn.Module):
    """Mix-in of a layer, right in front of its own class: its forward as it is written, with Liger's kernel in it."""

    _fused_turns: dict[str, str]  # names of functions -> "both" or "one"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = unmixed(self)
        own = kind.forward
        if torch.compiler.is_compiling():  # which fuses them itself
            return own(self, *args, **kwargs)
        names = {name: _KINDS[kind](own.__globals__[name]) for name, kind in self._fused_turns.items()}
        fused = FunctionType(own.__code__, own.__globals__ | names, own.__name__, own.__defaults__, own.__closure__)
        fused.__kwdefaults__ = own.__kwdefaults__
        return fused(self, *args, **kwargs)


def turns_of(layer: nn.Module, device: torch.device) -> dict[str, str]:
    """Names of the functions that turn queries and keys in a layer's own forward, for :class:`Turns`; Liger's kernel is
    tried on the device.
    """
    kind: Any = unmixed(layer)
    forward = kind.forward
    if not isinstance(forward, FunctionType):
        return {}
    found = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    tried = {name: next((kind for kind in _KINDS if _turns(f, kind, device)), "") for name, f in found.items() if f}
    return {name: kind for name, kind in tried.items() if kind}


def _turns(function: Any, kind: str, device: torch.device) -> bool:
    """Whether a function gives the rotation's numbers, and Liger's kernel its numbers and gradients."""
    if not callable(function) or isinstance(function, type):
        return False
    made = torch.Generator().manual_seed(0)
    angle = torch.randn(1, _LENGTH, _WIDTH // 2, generator=made, device="cpu").to(device)
    x, weight = torch.randn(2, 1, _HEADS, _LENGTH, _WIDTH, generator=made, device="cpu").to(device).unbind()
    x.requires_grad_()
    cos, sin = (f(torch.cat((angle, angle), dim=-1)) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    right = x * cos + torch.cat((-b, a), dim=-1) * sin
    given: tuple[Any, ...] = (x, x, cos, sin) if kind == "both" else (x, torch.stack((angle.cos(), angle.sin()), dim=1))
    try:
        outs = [f(*given) for f in (function, _KINDS[kind](function))]
        outs = [(out,) if isinstance(out, Tensor) else tuple(out) for out in outs]
        slopes = [torch.autograd.grad((each * weight).sum(), x, retain_graph=True)[0] for out in outs for each in out]
        same = [torch.allclose(each, right, atol=1e-5) for out in outs for each in out]
        alike = [torch.allclose(slope, slopes[0], atol=1e-5) for slope in slopes]
        return len(same) == (4 if kind == "both" else 2) and all(same) and all(alike)
    except Exception:  # it takes something else
        return False


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, query: Tensor, key: Tensor) -> Any:
        from liger_kernel.ops.rope import rope_forward

        turned = rope_forward(_copied(query), _copied(key), cos, sin)
        ctx.save_for_backward(*turned[2:])
        return turned[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from liger_kernel.ops.rope import rope_backward

        return None, None, *rope_backward(*map(_copied, gradients), *ctx.saved_tensors)[:2]


def _copied(x: Tensor) -> Tensor:
    """As the kernel wants it: heads beside their tokens in memory."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Liger's in the place of a function of queries, keys, cosines and sines, where they are what it knows."""

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        usual = not args and not kwargs and query.ndim == key.ndim == 4 and cos.ndim == sin.ndim == 3
        if usual and cos.shape[-1] == query.shape[-1] == key.shape[-1] and cos.dtype == query.dtype == key.dtype:
            return _Turn.apply(cos, sin, query, key)
        return function(query, key, cos, sin, *args, **kwargs)

    return turn


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Liger's in the place of a function of queries or keys, and a table ``[B, 2, (1,) T, width / 2]``."""

    def turn(x: Tensor, table: Tensor) -> Any:
        cos, sin = (half.flatten(0, -3) for half in torch.cat((table, table), dim=-1).to(x.dtype).unbind(1))
        return _Turn.apply(cos, sin, x, x[:, :1].detach())[0]

    return turn


_KINDS: dict[str, Callable[..., Any]] = {"both": _both, "one": _one}

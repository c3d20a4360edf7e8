"""The two kinds of output head of the chunked cross-entropy: a matrix, and any module.

Both give the logits of a chunk of tokens and take back the logits' gradient, and sum the gradients of their parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_BLOCK = 16_384  # rows of a 16-bit weight whose gradient is summed at a time: bounds the temporary


class MatrixHead:
    """``W h + b``.

    Args:
        hidden: The hidden states [N, H], for dtype and device.
        parameters: ``W`` [V, H], and ``b`` [V] if there is one.
        needed: Which of hidden states, ``W`` and ``b`` need gradients.
        autocast: The dtype of products under autocast.
    """

    def __init__(
        self, hidden: Tensor, parameters: tuple[Tensor, ...], needed: Sequence[bool], autocast: torch.dtype | None
    ) -> None:
        self.dtype = autocast if autocast is not None and hidden.dtype != torch.float64 else hidden.dtype
        self.device_type = hidden.device.type
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        weight, *rest = parameters
        self.weight = weight.detach().to(weight.dtype if autocast is None else self.dtype)
        self.bias = rest[0].detach().to(self.weight.dtype) if rest else None
        self.needs_hidden = needed[0]
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self.needed = list(needed[1:])
        self.x = hidden
        self.buffer: Tensor | None = None

    def logits(self, x: Tensor, keep: bool, wide: bool = True) -> Tensor:
        """Logits [n, V] of ``x`` [n, H], to be overwritten; ``keep`` if :meth:`backward` follows.

        ``wide`` if they are to be in float32 at least, and not in the product's own dtype.
        """
        self.x = x.to(self.dtype)
        if self.buffer is None:  # one for all chunks: fresh pages cost the CPU more than the products' edges
            self.buffer = x.new_empty(len(x), len(self.weight), dtype=self.weight.dtype)
        logits = self.buffer[: len(x)]
        with torch.autocast(self.device_type, enabled=False):
            torch.mm(self.x, self.weight.T, out=logits)
        if self.bias is not None:
            logits.add_(self.bias)
        return logits.to(self.wide) if wide else logits

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Gradient [n, H] of the last chunk from that of its logits [n, V]; those of the parameters are summed."""
        if len(self.needed) > 1 and self.needed[1]:
            self.sums[1] = gradient.sum(0, dtype=self.wide) + (0 if self.sums[1] is None else self.sums[1])
        narrow = gradient
        if gradient.dtype != self.weight.dtype:  # the product's own place is free again
            assert self.buffer is not None
            narrow = self.buffer[: len(gradient)].copy_(gradient)
        with torch.autocast(self.device_type, enabled=False):
            if self.needed[0]:
                self._sum_weight(narrow)
            return narrow @ self.weight if self.needs_hidden else None

    def _sum_weight(self, gradient: Tensor) -> None:
        total = self.sums[0]
        if total is None:
            total = self.sums[0] = torch.zeros_like(self.weight, dtype=self.wide)
        if gradient.dtype == total.dtype:
            total.addmm_(gradient.T, self.x)
            return
        for rows, columns in zip(total.split(_BLOCK), gradient.split(_BLOCK, dim=1)):
            rows.add_(columns.T @ self.x)

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the parameters, zeros where there was no token."""
        shapes = (self.weight, self.bias)
        return [
            torch.zeros_like(like, dtype=self.wide) if total is None and need and like is not None else total
            for total, need, like in zip(self.sums, self.needed, shapes)
        ]


class ModuleHead:
    """Any function of [n, H] to [n, V], differentiated by autograd, a chunk at a time."""

    def __init__(self, call: Callable[[Tensor], Tensor], hidden: Tensor, parameters: Sequence[Tensor]) -> None:
        self.call = call
        self.parameters = list(parameters)
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.device_type = hidden.device.type
        self.sums: list[Tensor] = []
        self.inputs: Tensor
        self.output: Tensor

    def logits(self, x: Tensor, keep: bool, wide: bool = True) -> Tensor:
        """As :meth:`MatrixHead.logits`."""
        with torch.set_grad_enabled(keep), self._uncached():
            self.inputs = x.detach().requires_grad_(keep)
            self.output = self.call(self.inputs)
        dtype = self.wide if wide else self.output.dtype
        return self.output.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    @contextmanager
    def _uncached(self) -> Iterator[None]:
        """Autocast without its cache, whose casts of the weights would be shared with graphs that are gone."""
        if not torch.is_autocast_enabled(self.device_type):
            yield
            return
        with torch.autocast(self.device_type, torch.get_autocast_dtype(self.device_type), cache_enabled=False):
            yield

    def backward(self, gradient: Tensor) -> Tensor:
        """As :meth:`MatrixHead.backward`."""
        wanted = [self.inputs, *self.parameters]
        parts = torch.autograd.grad(self.output, wanted, gradient.to(self.output.dtype), materialize_grads=True)
        del self.inputs, self.output
        if not self.sums:
            wider = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self.parameters]
            self.sums = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(self.parameters, wider)]
        for total, part in zip(self.sums, parts[1:]):
            total.add_(part)
        return parts[0]

    def gradients(self) -> list[Tensor | None]:
        """As :meth:`MatrixHead.gradients`."""
        return list(self.sums or map(torch.zeros_like, self.parameters))


def random_states(device: torch.device) -> list[Tensor]:
    """What :func:`drawing_again` goes back to."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def drawing_again(device: torch.device, states: list[Tensor], autocast: torch.dtype | None) -> Iterator[None]:
    """The dropout masks and the autocast of the forward pass."""
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, autocast, enabled=autocast is not None),
    ):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield

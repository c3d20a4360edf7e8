"""Shared parts of losses that apply an output head to one chunk of tokens at a time.

- :class:`MatrixHead` and :class:`ModuleHead` compute the logits of a chunk, take the gradient of these logits back and
  sum the gradients of the head's parameters over all chunks.
- :func:`apply_sweep` puts such a loss into the autograd graph. The gradients are computed in the forward pass, while
  the logits of each chunk exist. The backward pass only scales them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_efficient.internals.torch_products import add_product


class MatrixHead:
    """Output head that is one matrix: ``W h + b``.

    Args:
        hidden: Hidden states [N, H]. Only their dtype and device are used.
        parameters: ``W`` [V, H], followed by ``b`` [V] if the head has a bias.
        needed: One flag each for the hidden states, ``W`` and ``b``: whether a gradient is needed.
        autocast: Dtype of matrix products under autocast, or ``None`` without autocast.
    """

    def __init__(
        self, hidden: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool], autocast: torch.dtype | None
    ) -> None:
        self.dtype = hidden.dtype
        dtype = parameters[0].dtype
        if autocast is not None:
            if hidden.dtype != torch.float64:
                self.dtype = autocast
            dtype = self.dtype
        self.device_type = hidden.device.type
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        values = [parameter.detach().to(dtype) for parameter in parameters]
        self.weight = values[0]
        self.bias = values[1] if len(values) > 1 else None
        self.needs_hidden = needed[0]
        self.values = values
        self.needs = needed[1:]
        self.sums: list[Tensor | None] = [None] * len(values)
        self.x = hidden
        self.buffer: Tensor | None = None

    def logits(self, x: Tensor, keep: bool, wide: bool = True) -> Tensor:
        """Return the logits of one chunk. The caller may overwrite them.

        Args:
            x: Hidden states of the chunk, [n, H].
            keep: Whether :meth:`backward` follows.
            wide: Return float32 at least, and not the dtype of the matrix product.

        Returns:
            [n, V].
        """
        self.x = x.to(self.dtype)
        if self.buffer is None:
            # All chunks share one buffer: on a CPU, allocating fresh pages for each chunk is expensive.
            self.buffer = x.new_empty(len(x), len(self.weight), dtype=self.weight.dtype)
        logits = self.buffer[: len(x)]
        with torch.autocast(self.device_type, enabled=False):
            torch.mm(self.x, self.weight.T, out=logits)
        if self.bias is not None:
            logits.add_(self.bias)
        return logits.to(self.wide) if wide else logits

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the chunk's part to the gradients of the parameters.

        Args:
            gradient: Gradient of the last chunk's logits, [n, V].

        Returns:
            Gradient of the chunk's hidden states, [n, H], or ``None`` if it is not needed.
        """
        if len(self.needs) == 2 and self.needs[1]:
            part = gradient.sum(0, dtype=self.wide)
            self.sums[1] = part if self.sums[1] is None else self.sums[1].add_(part)
        narrow = gradient
        if gradient.dtype != self.weight.dtype:  # the logits are not needed any more: reuse their buffer
            assert self.buffer is not None
            narrow = self.buffer[: len(gradient)].copy_(gradient)
        with torch.autocast(self.device_type, enabled=False):
            if self.needs[0]:
                self.sums[0] = add_product(self.sums[0], narrow.T, self.x, self.wide)
            return narrow @ self.weight if self.needs_hidden else None

    def gradients(self) -> list[Tensor | None]:
        """Return the summed gradients of the parameters. They are zero if there was no token."""
        found: list[Tensor | None] = []
        for value, need, total in zip(self.values, self.needs, self.sums):
            if need and total is None:
                found.append(torch.zeros_like(value, dtype=self.wide))
            else:
                found.append(total)
        return found


class ModuleHead:
    """Output head that is any function of [n, H] to [n, V]. Autograd differentiates it chunk by chunk.

    Args:
        call: The function.
        hidden: Hidden states [N, H]. Only their dtype and device are used.
        parameters: Parameters of the head that train.
        trains: Whether :meth:`backward` will be called.
    """

    def __init__(
        self, call: Callable[[Tensor], Tensor], hidden: Tensor, parameters: Sequence[Tensor], trains: bool
    ) -> None:
        self.call = call
        self.parameters = parameters
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.device_type = hidden.device.type
        self.sums: list[Tensor] = []
        if trains:
            for parameter in parameters:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self.sums.append(torch.zeros_like(parameter, dtype=wide))
        self.inputs: Tensor
        self.output: Tensor

    def logits(self, x: Tensor, keep: bool, wide: bool = True) -> Tensor:
        """Return the logits of one chunk, as :meth:`MatrixHead.logits` does."""
        with torch.set_grad_enabled(keep), self._autocast_without_cache():
            self.inputs = x.detach().requires_grad_(keep)
            self.output = self.call(self.inputs)
        dtype = self.wide if wide else self.output.dtype
        return self.output.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    @contextmanager
    def _autocast_without_cache(self) -> Iterator[None]:
        """Switch off the cache of autocast, which would share cast weights between the graphs of two chunks."""
        if not torch.is_autocast_enabled(self.device_type):
            yield
            return
        with torch.autocast(self.device_type, torch.get_autocast_dtype(self.device_type), cache_enabled=False):
            yield

    def backward(self, gradient: Tensor) -> Tensor:
        """Add the chunk's part to the gradients of the parameters, as :meth:`MatrixHead.backward` does."""
        wanted = [self.inputs, *self.parameters]
        hidden, *parts = torch.autograd.grad(
            self.output, wanted, gradient.to(self.output.dtype), materialize_grads=True
        )
        del self.inputs, self.output  # the graph of this chunk
        for total, part in zip(self.sums, parts):
            total.add_(part)
        return hidden

    def gradients(self) -> list[Tensor | None]:
        """Return the summed gradients of the parameters. They are zero if there was no token."""
        return [*self.sums]


def is_expanded(gradient: Tensor) -> bool:
    """Return whether all elements are the same number in memory, as in the gradient of a sum. No value is read."""
    return gradient.numel() <= 1 or not any(gradient.stride())


class Sweep(Protocol):
    """One pass over all tokens, chunk by chunk, that computes losses and their gradients together."""

    @property
    def name(self) -> str:
        """Name of the loss in error messages."""

    @property
    def trains(self) -> bool:
        """True if gradients are computed."""

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of autocast during the forward pass."""

    def run(
        self, hidden: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool], upstream: Tensor | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """Compute the losses, and the gradients of hidden states and parameters.

        Args:
            hidden: [N, H].
            parameters: Parameters of the head.
            needed: One flag each for the hidden states and the parameters: whether a gradient is needed.
            upstream: Gradient of the first output, or ``None`` for a gradient of ones.

        Returns:
            The outputs, of which only the first is differentiable, and the gradients.
        """

    def factors(self, count: int, upstream: Tensor) -> Sequence[Tensor] | None:
        """Return factors that turn ``count`` gradients for an upstream gradient of ones into those for ``upstream``.

        Returns:
            None if no factors do that. The gradients must be computed again then.
        """


def apply_sweep(sweep: Sweep, hidden: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a sweep inside the autograd graph and return its outputs."""
    return _GradientInForward.apply(sweep, hidden, *parameters)


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: Sweep, hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.sweep = sweep
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        if sweep.trains:
            # Saving them also makes it an error to change them before the backward pass.
            ctx.save_for_backward(hidden, *parameters)
            ctx.random = _random_states(hidden.device)
        outputs, ctx.gradients = sweep.run(hidden, parameters, ctx.needs_input_grad[1:], None)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        sweep: Sweep = ctx.sweep
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{sweep.name}: the gradient is computed in the forward pass and has no derivative of its own. Use a "
                "loss of torch.nn.functional where create_graph=True is needed"
            )
        gradients = ctx.gradients
        ctx.gradients = None  # autograd may keep or change these tensors, so a second backward pass needs new ones
        factors = None
        if gradients is not None:
            factors = sweep.factors(len(gradients), upstream)
        if factors is None:
            hidden, *parameters = ctx.saved_tensors
            with _forward_state(hidden.device, ctx.random, sweep.autocast):
                _, gradients = sweep.run(hidden, parameters, ctx.needs_input_grad[1:], upstream)
            return None, *(g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes))
        return None, *map(_scaled, gradients, factors, ctx.dtypes)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))  # scale and round in one pass


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextmanager
def _forward_state(device: torch.device, states: list[Tensor], autocast: torch.dtype | None) -> Iterator[None]:
    """Restore the random states and the autocast of the forward pass, so that dropout masks are the same."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, autocast, enabled=autocast is not None):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield

"""States of an optimizer in CPU memory. A step fetches, steps and returns one piece of the parameters at a time.

Copies run on their own stream: while a piece is stepped, the next one arrives and the last one leaves.
"""

import functools
from collections.abc import Collection, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.internals.torch_as_cuda import moves, stands_in
from lit_efficient.mechanisms.blocks.side_copies import SideCopies
from lit_efficient.optimizers.host_gradients import HostGradients
from lit_efficient.optimizers.host_memory import HostMemory
from lit_efficient.optimizers.independence import check_independent
from lit_efficient.optimizers.stepping import (
    change_class,
    check_unchanged,
    loss_of,
    pieces,
    step_some,
    unhooked,
    with_gradient,
    with_step,
)


class HostStates:
    """States of one optimizer in CPU memory, with copies to its device and back.

    The fetched states are freed on the stream of the copies, so at most three pieces are on the device even if the CPU
    runs far ahead.

    Args:
        memory: CPU memory of the optimizer.
        gradients: Gradients in the same memory, or ``None`` if gradients stay on the device.
    """

    def __init__(self, memory: HostMemory, gradients: HostGradients | None = None) -> None:
        self.memory = memory
        self.optimizer = memory.optimizer
        self.gradients = gradients
        self._hosts: dict[tuple[Tensor, str], Tensor] = {}
        self._fetched: dict[tuple[Tensor, str], Tensor] = {}

    @property
    def copies(self) -> SideCopies:
        """Stream of the copies."""
        return self.memory.copies

    @property
    def held(self) -> int:
        """Bytes of CPU memory that are allocated."""
        return self.memory.held

    @property
    def state_bytes(self) -> int:
        """Bytes of the states in CPU memory."""
        return sum(host.nbytes for host in self._hosts.values())

    def all_pieces(self) -> Iterator[list[Tensor]]:
        """Yield all parameters, one piece at a time."""
        for group in self.optimizer.param_groups:
            yield from pieces(group["params"], self.memory.piece_bytes)

    def stepped_pieces(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Return the pieces of all parameters with a gradient, each with its group."""
        if self.gradients is None:
            has_gradient = with_gradient
        else:
            has_gradient = self.gradients.of_group
        found = []
        for group in self.optimizer.param_groups:
            found += [(group, piece) for piece in pieces(has_gradient(group), self.memory.piece_bytes)]
        return found

    def fetch(self, piece: list[Tensor]) -> Any:
        """Start to copy the states of a piece to its device. Return an event for ``copies.wait``."""
        with self.copies.beside():
            for p, key, value in self._states(piece):
                if stands_in(value):
                    moves(value, away=False)
                elif value is self._hosts.get((p, key)) or value.device != p.device:
                    moved = value.to(p.device, non_blocking=True, copy=True)
                    self.optimizer.state[p][key] = moved
                    self._fetched[p, key] = moved
            if self.gradients is not None:
                self.gradients.fetch(piece)
            return self.copies.done()

    def put_back(self, piece: list[Tensor]) -> None:
        """Start to copy the states of a piece to CPU memory, after its step."""
        self.copies.begin()
        fresh = False
        states = self._states(piece)
        new = sum(value.nbytes for p, key, value in states if (p, key) not in self._hosts)
        with self.copies.beside():
            for p, key, value in states:
                host = self._hosts.get((p, key))
                if stands_in(value):
                    moves(value, away=True)
                    continue
                if value is host:
                    continue
                if host is None or (host.shape, host.dtype) != (value.shape, value.dtype):
                    host = self.memory.take(value, new)
                    self._hosts[p, key] = host
                fresh |= self._fetched.pop((p, key), None) is not value
                self.optimizer.state[p][key] = host.copy_(value, non_blocking=True)
        if self.gradients is not None:
            self.gradients.release(piece)
        if fresh:
            # The step has created a state, as the first one does. Its memory belongs to the stream of the computation,
            # which could reuse it before the copy is done.
            self.copies.finish()

    def allow_reads(self) -> None:
        """Allow reads of gradients on the device again."""
        if self.gradients is not None:
            self.gradients.reads.stop()

    def _states(self, piece: list[Tensor]) -> list[tuple[Tensor, str, Tensor]]:
        """Return all tensors in the states of a piece, except step counters, which are never moved."""
        found = []
        for p in piece:
            state = self.optimizer.state.get(p)
            if isinstance(state, MutableMapping):
                found += [
                    (p, key, value) for key, value in state.items() if isinstance(value, Tensor) and key != "step"
                ]
        return found


class Streamed(Optimizer):
    """Base that marks an optimizer which keeps its states in CPU memory."""

    host_states: HostStates

    @property
    def gradients_taken(self) -> Collection[Tensor]:
        """Parameters whose gradients are in CPU memory."""
        if self.host_states.gradients is None:
            return {}
        return self.host_states.gradients.arrived()


def stream_states(optimizer: Optimizer, piece_bytes: int, gradients: bool = False, who: str = "stream_states") -> None:
    """Change the class of ``optimizer``, in place, to one that keeps its states in CPU memory between steps.

    Args:
        optimizer: Optimizer whose step treats each parameter independently.
        piece_bytes: Bytes of parameters that are stepped at a time.
        gradients: Keep gradients in CPU memory too. The backward passes must run inside the context
            ``optimizer.host_states.gradients.leaving()``.
        who: Name at the beginning of error messages.
    """
    kind: Any = type(optimizer)
    check_independent(optimizer, who)
    change_class(optimizer, streamed(kind))
    memory = HostMemory(optimizer, piece_bytes)
    held = HostGradients(memory, who) if gradients else None
    optimizer.host_states = HostStates(memory, held)  # type: ignore[attr-defined]  # of `Streamed`


@functools.cache
def streamed(base: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of ``base`` that steps one piece at a time. It has the name of ``base``."""
    inner = unhooked(base)  # hooks must run once a step, not once a piece

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        store: HostStates = self.host_states
        try:
            loss = loss_of(closure)
        finally:
            store.allow_reads()
        stepped = store.stepped_pieces()
        store.copies.begin()
        fetched = store.fetch(stepped[0][1]) if stepped else None
        try:
            for number, (group, piece) in enumerate(stepped, 1):
                store.copies.wait(fetched)
                if number < len(stepped):
                    fetched = store.fetch(stepped[number][1])
                check_unchanged(self, step_some(self, inner, group, piece), "offloading the states")
                store.put_back(piece)
        finally:
            store.copies.finish()
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        base.zero_grad(self, set_to_none)
        if self.host_states.gradients is not None:
            self.host_states.gradients.clear(set_to_none)

    return with_step(base, Streamed, step, zero_grad=zero_grad)

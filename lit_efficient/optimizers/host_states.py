"""States of an optimizer in CPU memory: fetched, stepped and put back a piece at a time, copied beside the steps."""

import functools
from collections.abc import Collection, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.blocks.side_copies import SideCopies
from lit_efficient.optimizers.host_gradients import HostGradients
from lit_efficient.optimizers.stepping import change_class, loss_of, pieces, unhooked, with_gradient, with_step

_ALIGNED = 64  # bytes


class HostStates:
    """The states of an optimizer in CPU memory that is taken once, and their way to the device and back.

    Its step must treat each parameter on its own; ``piece_bytes`` of parameters are stepped at a time. Copies run on a
    stream of their own: while a piece is stepped, the next one comes and the last one goes. What is fetched is freed on
    that stream, too, so that three pieces at most are on the device however far the CPU is ahead.
    """

    def __init__(self, optimizer: Optimizer, piece_bytes: int) -> None:
        self.optimizer, self.piece_bytes = optimizer, piece_bytes
        self.gradients: HostGradients | None = None
        self._hosts: dict[tuple[Tensor, str], Tensor] = {}
        self._fetched: dict[tuple[Tensor, str], Tensor] = {}
        self._chunks: list[list[Any]] = []  # bytes, and how many of each are taken

    @functools.cached_property
    def copies(self) -> SideCopies:
        """The stream of the copies."""
        return SideCopies(next(p.device for group in self.optimizer.param_groups for p in group["params"]))

    @property
    def held(self) -> int:
        """Bytes of CPU memory that are taken."""
        return sum(memory.nbytes for memory, _ in self._chunks)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states in it."""
        return sum(host.nbytes for host in self._hosts.values())

    def all_pieces(self) -> Iterator[list[Tensor]]:
        """All parameters, a piece at a time."""
        for group in self.optimizer.param_groups:
            yield from pieces(group["params"], self.piece_bytes)

    def fetch(self, piece: list[Tensor]) -> Any:
        """Bring the states of a piece to its device; what the copies' `wait` takes."""
        with self.copies.beside():
            for p, key, value in self._states(piece):
                if value is self._hosts.get((p, key)) or value.device != p.device:
                    moved = value.to(p.device, non_blocking=True, copy=True)
                    self.optimizer.state[p][key] = self._fetched[p, key] = moved
            if self.gradients is not None:
                self.gradients.fetch(piece)
            return self.copies.done()

    def put_back(self, piece: list[Tensor]) -> None:
        """Copy the states of a piece to CPU memory once its step is done."""
        self.copies.begin()
        fresh = False
        states = self._states(piece)
        new = sum(value.nbytes for p, key, value in states if (p, key) not in self._hosts)
        with self.copies.beside():
            for p, key, value in states:
                host = self._hosts.get((p, key))
                if value is host:
                    continue
                if host is None or (host.shape, host.dtype) != (value.shape, value.dtype):
                    host = self._hosts[p, key] = self.take(value, new)
                fresh |= self._fetched.pop((p, key), None) is not value
                self.optimizer.state[p][key] = host.copy_(value, non_blocking=True)
        if self.gradients is not None:
            self.gradients.release(piece)
        if fresh:  # made by the step, as in the first one: its memory is not this stream's to free
            self.copies.finish()

    def allow_reads(self) -> None:
        """Let everybody look for gradients on the device again."""
        if self.gradients is not None:
            self.gradients.reads.stop()

    def _states(self, piece: list[Tensor]) -> list[tuple[Tensor, str, Tensor]]:
        """Without step counters, which stay where they are."""
        held = ((p, self.optimizer.state.get(p)) for p in piece)
        return [
            (p, key, value)
            for p, state in held
            if isinstance(state, MutableMapping)
            for key, value in state.items()
            if isinstance(value, Tensor) and key != "step"
        ]

    def take(self, value: Tensor, new: int) -> Tensor:
        """CPU memory for one, of the first chunk with room, else of one as large as the ``new`` bytes of its piece.

        Chunks are powers of two, to which torch would round the pinned memory of each state. Each state has a storage
        of its own within: a checkpoint writes whole storages, and none that is read as two types.
        """
        size = -(-value.nbytes // _ALIGNED) * _ALIGNED
        chunk = next((chunk for chunk in self._chunks if chunk[1] + size <= chunk[0].nbytes), None)
        if chunk is None:
            room = 1 << max((size - 1).bit_length(), new.bit_length() - 1)
            chunk = [self.copies.host(room), 0]
            self._chunks.append(chunk)
        memory, offset = chunk
        chunk[1] += size
        part = torch.from_numpy(memory.numpy()[offset : offset + value.nbytes])
        shape = torch.empty_like(value, device="meta")
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        return empty.set_(part.untyped_storage(), 0, shape.shape, shape.stride())


class Streamed(Optimizer):
    """What marks an optimizer that keeps its states in CPU memory."""

    host_states: HostStates

    @property
    def gradients_taken(self) -> Collection[Tensor]:
        """Parameters whose gradients are in CPU memory."""
        return {} if self.host_states.gradients is None else self.host_states.gradients.arrived()


def stream_states(optimizer: Optimizer, piece_bytes: int, gradients: bool = False, who: str = "stream_states") -> None:
    """Change ``optimizer``'s class, in place, to one that keeps its states in CPU memory between steps.

    Its step must treat each parameter on its own; ``piece_bytes`` of parameters are stepped at a time. ``gradients``: a
    step takes those from CPU memory, too, of backward passes inside ``optimizer.host_states.gradients.leaving()``.
    """
    kind: Any = type(optimizer)
    change_class(optimizer, streamed(kind))
    optimizer.host_states = HostStates(optimizer, piece_bytes)  # type: ignore[attr-defined]  # of `Streamed`
    if gradients:
        store: HostStates = optimizer.host_states  # type: ignore[attr-defined]
        store.gradients = HostGradients(store, who)


def check_unchanged(optimizer: Optimizer, group: dict[str, Any], who: str = "offloading the states") -> None:
    """Refuse an optimizer whose step has written to the group of a piece: that of all parameters would not have it."""
    (stepped,) = optimizer.param_groups
    written = [key for key, value in stepped.items() if key != "params" and value is not group.get(key, optimizer)]
    if written:
        raise ConfigurationError(
            f"{who}: the step of {type(optimizer).__name__} writes {', '.join(map(repr, written))} to its groups, for "
            f"all their parameters at once, which has no pieces; train without {who}"
        )


@functools.cache
def streamed(base: type[Optimizer]) -> type[Optimizer]:
    """``base`` with a step in pieces; the class keeps its name."""
    inner = unhooked(base)  # hooks run once, not for each piece

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        groups, store = self.param_groups, self.host_states
        try:
            loss = loss_of(closure)
        finally:
            store.allow_reads()
        has = with_gradient if store.gradients is None else store.gradients.of_group
        stepped = [(group, piece) for group in groups for piece in pieces(has(group), store.piece_bytes)]
        store.copies.begin()
        fetched = store.fetch(stepped[0][1]) if stepped else None
        try:
            for number, (group, piece) in enumerate(stepped, 1):
                store.copies.wait(fetched)
                fetched = store.fetch(stepped[number][1]) if number < len(stepped) else None
                self.param_groups = [group | {"params": piece}]
                inner(self)
                check_unchanged(self, group)
                store.put_back(piece)
        finally:
            self.param_groups = groups
            store.copies.finish()
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        base.zero_grad(self, set_to_none)
        if self.host_states.gradients is not None:
            self.host_states.gradients.clear(set_to_none)

    return with_step(base, Streamed, step, zero_grad=zero_grad)

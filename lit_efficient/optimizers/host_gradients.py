"""Gradients in CPU memory: each leaves its device as soon as it is complete, and comes back for its parameter's step.

Autograd keeps ``p.grad`` on the parameter's device. So a stand of each parameter has the gradient meanwhile: a tensor
on the CPU of the same shape that takes no memory, and whose ``grad`` may be read, clipped and scaled like any other.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_efficient.optimizers.later_reads import LaterReads

if TYPE_CHECKING:
    from lit_efficient.optimizers.host_states import HostStates


class HostGradients:
    """The gradients of one optimizer, in the CPU memory of its states and on the stream of their copies."""

    def __init__(self, store: "HostStates", who: str) -> None:
        self.store = store
        self.reads = LaterReads(who, "it lies in CPU memory")
        self._stands: dict[Tensor, nn.Parameter] = {}
        self._memory: dict[Tensor, Tensor] = {}
        self._under_way = 0  # bytes whose copies nobody has waited for

    @property
    def bytes_held(self) -> int:
        """Bytes of the gradients' CPU memory."""
        return sum(memory.nbytes for memory in self._memory.values())

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """While a backward pass runs: each gradient goes to CPU memory, onto what is there, when it is complete."""
        with ExitStack() as hooks:
            hooks.callback(self.store.copies.finish)
            for p in [p for p in self._parameters() if p.requires_grad]:
                hooks.enter_context(p.register_post_accumulate_grad_hook(self._leave))
            yield

    def arrived(self) -> dict[Tensor, nn.Parameter]:
        """What stands for each parameter whose gradient is in CPU memory, once all copies are done."""
        self.store.copies.finish()
        return {p: stand for p, stand in self._stands.items() if stand.grad is not None}

    def clear(self, set_to_none: bool = True) -> None:
        """What ``zero_grad`` does to gradients."""
        for stand in self._stands.values():
            if set_to_none:
                stand.grad = None
            elif stand.grad is not None:
                stand.grad.zero_()

    def of_group(self, group: dict[str, Any]) -> list[Tensor]:
        """The tensors of a group that a step moves."""
        return [p for p in group["params"] if self._stands.get(p, p).grad is not None or p.grad is not None]

    def fetch(self, piece: list[Tensor]) -> None:
        """Bring the gradients of a piece to its device, on the stream of the copies."""
        for p in piece:
            stand = self._stands.get(p)
            if stand is not None and stand.grad is not None:
                p.grad = stand.grad.to(p.device, non_blocking=True, copy=True)

    def release(self, piece: list[Tensor]) -> None:
        """After a step: the device's copies are not needed any more."""
        for p in piece:
            if p in self._stands:
                p.grad = None

    @torch.no_grad()
    def _leave(self, p: Tensor) -> None:
        gradient = p.grad
        if gradient is None or gradient.is_sparse:
            return
        stand = self._stands.get(p)
        if stand is None:  # an expanded number: it takes no memory
            stand = self._stands[p] = nn.Parameter(torch.empty((), dtype=p.dtype, device="cpu").expand(p.shape))
            left = sum(q.nbytes for q in self._parameters() if q.requires_grad and q not in self._memory)
            self._memory[p] = self.store.take(gradient, left)
        self.store.copies.begin()
        with self.store.copies.beside():
            if stand.grad is not None:  # added on the device, as autograd adds
                gradient = stand.grad.to(p.device, non_blocking=True, copy=True).add_(gradient)
            self._memory[p].copy_(gradient, non_blocking=True)
            if self.store.copies.stream is not None and p.grad is not None:
                p.grad.record_stream(self.store.copies.stream)
        stand.grad = self._memory[p]
        p.grad = None
        self._under_way += p.nbytes
        if self._under_way >= self.store.piece_bytes:  # or they would wait on the device for the bus
            self.store.copies.finish()
            self._under_way = 0

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.store.optimizer.param_groups:
            yield from group["params"]

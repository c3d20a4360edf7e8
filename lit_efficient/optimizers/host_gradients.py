"""Gradients in CPU memory: each leaves its device as soon as it is complete, and returns for the step of its parameter.

Autograd only accepts ``p.grad`` on the device of the parameter. Meanwhile a proxy of each parameter holds the gradient:
a tensor on the CPU that has the same shape and takes no memory. Its ``grad`` can be read, clipped and scaled as usual.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.optimizers.host_memory import HostMemory
from lit_efficient.optimizers.later_reads import LaterReads


class HostGradients:
    """Gradients of one optimizer in CPU memory.

    Args:
        memory: Memory that the optimizer's states use too.
        who: Name at the beginning of error messages.
    """

    def __init__(self, memory: HostMemory, who: str) -> None:
        self.memory = memory
        self.reads = LaterReads(who, "it is in CPU memory")
        self._proxies: dict[Tensor, nn.Parameter] = {}
        self._hosts: dict[Tensor, Tensor] = {}
        self._copying = 0  # bytes whose copies have been queued since the last wait

    @property
    def bytes_held(self) -> int:
        """Bytes of the gradients in CPU memory."""
        return sum(host.nbytes for host in self._hosts.values())

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Move each gradient to CPU memory when it is complete, during the backward pass inside this context.

        Gradients are added to those that are already there.
        """
        with ExitStack() as hooks:
            hooks.callback(self.memory.copies.finish)
            for p in self.memory.parameters():
                if p.requires_grad:
                    hooks.enter_context(p.register_post_accumulate_grad_hook(self._leave))
            yield

    def arrived(self) -> dict[Tensor, nn.Parameter]:
        """Wait for all copies, and return the proxy of each parameter whose gradient is in CPU memory."""
        self.memory.copies.finish()
        return {p: proxy for p, proxy in self._proxies.items() if proxy.grad is not None}

    def clear(self, set_to_none: bool = True) -> None:
        """Clear the gradients as ``Optimizer.zero_grad`` does."""
        for proxy in self._proxies.values():
            if set_to_none:
                proxy.grad = None
            elif proxy.grad is not None:
                proxy.grad.zero_()

    def of_group(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the parameters of a group that have a gradient, on the device or in CPU memory."""
        return [p for p in group["params"] if self._proxies.get(p, p).grad is not None or p.grad is not None]

    def fetch(self, piece: list[Tensor]) -> None:
        """Copy the gradients of some parameters to their device, on the current stream."""
        for p in piece:
            proxy = self._proxies.get(p)
            if proxy is not None and proxy.grad is not None:
                p.grad = proxy.grad.to(p.device, non_blocking=True, copy=True)

    def release(self, piece: list[Tensor]) -> None:
        """Free the gradients on the device after a step."""
        for p in piece:
            if p in self._proxies:
                p.grad = None

    @torch.no_grad()
    def _leave(self, p: Tensor) -> None:
        gradient = p.grad
        if gradient is None or gradient.is_sparse:
            return
        proxy = self._proxies.get(p)
        if proxy is None:
            # One number that is expanded to the shape takes no memory.
            proxy = nn.Parameter(torch.empty((), dtype=p.dtype, device="cpu").expand(p.shape))
            self._proxies[p] = proxy
            others = [q for q in self.memory.parameters() if q.requires_grad and q not in self._hosts]
            self._hosts[p] = self.memory.take(gradient, sum(q.nbytes for q in others))
        host = self._hosts[p]
        copies = self.memory.copies
        copies.begin()
        with copies.beside():
            if proxy.grad is not None:  # added on the device, so that the sum is the same as autograd's
                gradient = proxy.grad.to(p.device, non_blocking=True, copy=True).add_(gradient)
            host.copy_(gradient, non_blocking=True)
            if copies.stream is not None and p.grad is not None:
                p.grad.record_stream(copies.stream)
        proxy.grad = host
        p.grad = None
        self._copying += p.nbytes
        if self._copying >= self.memory.piece_bytes:  # otherwise waiting gradients would pile up on the device
            copies.finish()
            self._copying = 0

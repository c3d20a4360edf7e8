"""Copies between CPU memory and a device, on a stream beside the computation."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SideCopies:
    """A stream for copies. Memory that is taken within :meth:`beside` belongs to it.

    Such memory may be let go of at any time: it is taken again by this stream alone, and every copy waits for what the
    device was asked to compute before (:meth:`begin`). Where there are no streams, copies are done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self) -> AbstractContextManager[Any]:
        """Run inside on the stream of the copies."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def begin(self) -> None:
        """Copies that follow start after all that was asked of the device until now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def done(self) -> Any:
        """What :meth:`wait` takes: that all copies asked for until now are done."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, done: Any) -> None:
        """Let the computation wait for copies; the CPU goes on."""
        if self.stream is not None and done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def finish(self) -> None:
        """Let the CPU wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def host(self, size: int) -> Tensor:
        """So many bytes of CPU memory, which the device reads and writes by itself."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)


class Place(NamedTuple):
    """Where a tensor lies in a memory: all but the memory."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in bytes

    def view(self, memory: Tensor) -> Tensor:
        """The tensor that lies there in ``memory``."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset // self.dtype.itemsize, self.shape, self.stride)


def place_of(tensor: Tensor, offset: int | None = None) -> Place:
    """Where a tensor lies in its own memory, or ``offset`` bytes from the start of another one."""
    start = int(tensor.storage_offset()) * tensor.element_size() if offset is None else offset
    return Place(tensor.dtype, tensor.shape, tensor.stride(), start)


def whole(tensor: Tensor) -> Tensor:
    """The memory that a tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

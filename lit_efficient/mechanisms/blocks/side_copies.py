"""Copies between CPU memory and a device, on a stream of their own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.torch_fake import FakeTensor


def check_separate_memory(device: torch.device, who: str, instead: str) -> None:
    """Raise an error if ``device`` uses CPU memory, so that moving tensors to the CPU saves nothing.

    Args:
        device: Device of the run.
        who: Name of the technique.
        instead: Technique that saves memory on any device.

    Raises:
        ConfigurationError: For a CPU and for MPS.
    """
    if device.type in ("cpu", "mps"):
        raise ConfigurationError(
            f"{who}: this trainer's device is {device.type!r}, which uses CPU memory: nothing can be saved. Use "
            f"accelerator='gpu', or {instead}, which saves memory on any device"
        )


class SideCopies:
    """Stream for copies. Memory that is allocated within :meth:`beside` belongs to the stream.

    Such memory may be freed at any time: only this stream allocates it again, and each copy waits for the operations
    that were queued on the device before (:meth:`begin`). On devices without streams copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context whose operations run on the stream of the copies."""
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)

    def begin(self) -> None:
        """Let the following copies wait for all operations that are queued on the device now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def done(self) -> torch.cuda.Event | None:
        """Return an event for :meth:`wait` that is complete when all copies queued until now are done."""
        if self.stream is None:
            return None
        return self.stream.record_event()

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Let the device's computation wait for an event of :meth:`done`. The CPU does not wait."""
        if self.stream is not None and done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def finish(self) -> None:
        """Let the CPU wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def host(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of CPU memory, pinned where the device has streams."""
        if kind_of(self.device) != self.device.type:  # a plan without a GPU, which counts the memory of its stand-in
            return torch.empty(size, dtype=torch.uint8, device="meta")
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)


class Place(NamedTuple):
    """Location and layout of a tensor in a piece of memory, without the memory itself."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in bytes

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor at this place in ``memory``."""
        if isinstance(memory, FakeTensor):
            return memory.view(self.dtype).as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset // self.dtype.itemsize, self.shape, self.stride)


def place_of(tensor: Tensor, offset: int | None = None) -> Place:
    """Return the place of a tensor in its own memory, or at ``offset`` bytes from the start of another memory."""
    if offset is None:
        offset = int(tensor.storage_offset()) * tensor.element_size()
    return Place(tensor.dtype, tensor.shape, tensor.stride(), offset)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as a tensor of bytes."""
    if isinstance(tensor, FakeTensor):
        numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.as_strided((numbers,), (1,), 0).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

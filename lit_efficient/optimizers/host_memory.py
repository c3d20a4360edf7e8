"""CPU memory for the states and gradients of one optimizer, and the stream that copies them."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.mechanisms.blocks.side_copies import SideCopies

_ALIGNED = 64  # bytes


@dataclass
class _Chunk:
    memory: Tensor  # bytes
    used: int = 0  # bytes from the start that belong to a tensor


class HostMemory:
    """CPU memory that the states and gradients of one optimizer share. It is allocated once and never freed.

    Args:
        optimizer: The optimizer.
        piece_bytes: Bytes of parameters that are on the device at a time.
    """

    def __init__(self, optimizer: Optimizer, piece_bytes: int) -> None:
        self.optimizer = optimizer
        self.piece_bytes = piece_bytes
        self._chunks: list[_Chunk] = []

    @functools.cached_property
    def copies(self) -> SideCopies:
        """Stream of the copies between this memory and the device of the parameters."""
        return SideCopies(self.parameters()[0].device)

    @property
    def held(self) -> int:
        """Bytes of CPU memory that are allocated."""
        return sum(chunk.memory.nbytes for chunk in self._chunks)

    def parameters(self) -> list[Tensor]:
        """Return all parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def take(self, value: Tensor, upcoming: int) -> Tensor:
        """Return an uninitialised CPU tensor with the shape, strides and dtype of ``value``.

        It lies in the first chunk that has room, or in a new chunk. The size of a chunk is a power of two, because
        torch rounds every allocation of pinned memory up to one. Each tensor gets a storage of its own inside the
        chunk: checkpoints write whole storages, and refuse storages that are used with two dtypes.

        Args:
            value: Tensor on any device.
            upcoming: Bytes that will be taken in all, this tensor included. A new chunk has at least half as many.
        """
        size = -(-value.nbytes // _ALIGNED) * _ALIGNED
        chunk = next((chunk for chunk in self._chunks if chunk.used + size <= chunk.memory.nbytes), None)
        if chunk is None:
            chunk = _Chunk(self.copies.host(1 << max((size - 1).bit_length(), upcoming.bit_length() - 1)))
            self._chunks.append(chunk)
        part = torch.from_numpy(chunk.memory.numpy()[chunk.used : chunk.used + value.nbytes])
        chunk.used += size
        layout = torch.empty_like(value, device="meta")
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        return empty.set_(part.untyped_storage(), 0, layout.shape, layout.stride())

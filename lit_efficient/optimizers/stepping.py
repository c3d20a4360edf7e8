"""What every ``step`` of an optimizer begins with: the closure's loss, and the tensors that have a gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Run the closure, which computes gradients, inside a ``step`` that runs without; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """The tensors of a group that a step moves."""
    return [p for p in group["params"] if p.grad is not None]


def pieces(parameters: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """The parameters in lists of at most so many bytes, at least one in each."""
    piece: list[Tensor] = []
    size = 0
    for p in parameters:
        if piece and size + p.nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append(p)
        size += p.nbytes
    if piece:
        yield piece

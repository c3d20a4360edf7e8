"""What mixed precision keeps for the backward pass: 16-bit activations, which are half, and 16-bit copies of weights.

    float32 - mixed  =  bytes of 16-bit activations  -  bytes of 16-bit copies of weights

Autocast casts each weight that a product reads, and its gradient needs the copy: 2 bytes a weight, whatever the batch.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_LOW = (torch.bfloat16, torch.float16)


class MixedCopies:
    """Counts what a forward keeps in 16 bits."""

    def __init__(self) -> None:
        self.weights = 0  # bytes of copies of weights
        self.activations = 0  # bytes of all else

    @contextmanager
    def counting(self, module: nn.Module) -> Iterator[None]:
        """Count what is kept inside, in which ``module`` computes once; each memory counts once."""
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.dtype in _LOW and type(tensor) is Tensor:
                kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        wide = {p for p in module.parameters() if p.dtype is torch.float32 and p.ndim > 1}
        copies = Counter(tuple(sorted(p.shape)) for p in wide)  # a copy may be kept transposed
        for tensor in kept.values():
            shape = tuple(sorted(tensor.shape))
            copied = copies[shape] > 0
            copies[shape] -= copied
            if copied:
                self.weights += tensor.untyped_storage().nbytes()
            else:
                self.activations += tensor.untyped_storage().nbytes()

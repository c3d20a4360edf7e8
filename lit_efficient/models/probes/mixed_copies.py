"""What mixed precision keeps for the backward pass: 16-bit activations, which are half, and 16-bit copies of weights.

    float32 - mixed  =  bytes of 16-bit activations  -  bytes of 16-bit copies of weights

Autocast casts each weight that a product reads, and its gradient needs the copy: 2 bytes a weight, whatever the batch.
Seen by hooks on the layers, which forbid nothing in a forward: those on saved tensors exclude ``torch.func``.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_trees import tree_leaves

_LOW = (torch.bfloat16, torch.float16)


class MixedCopies:
    """Counts at most what layers with matrices read and give in 16 bits, and at least the copies of their weights."""

    def __init__(self) -> None:
        self.weights = 0  # bytes of copies of weights
        self.activations = 0  # bytes of what goes in and comes out

    @contextmanager
    def counting(self, module: nn.Module) -> Iterator[None]:
        """Count inside, where ``module`` computes; each weight counts once, and each memory that lives."""
        seen: set[Tensor] = set()

        def count(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            given = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            if not any(x.dtype in _LOW for x in given):
                return  # a table of embeddings, or a precision that casts nothing
            own = {p for p in part.parameters(recurse=False) if p.ndim > 1 and p.dtype is torch.float32} - seen
            seen.update(own)
            self.weights += sum(2 * p.numel() for p in own)
            taken = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
            self.activations += sum(2 * x.numel() for x in [*taken, *given] if x.is_floating_point())

        with ExitStack() as hooks:
            for part in module.modules():
                if any(p.ndim > 1 and p.dtype is torch.float32 for p in part.parameters(recurse=False)):
                    hooks.callback(part.register_forward_hook(count).remove)
            yield

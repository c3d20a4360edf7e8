"""Equal random numbers for a batch and for its parts, so that each row has the same noise in both.

draws = Draws();               with draws: loss of the whole batch
part = Draws(draws.values, i, k);    with part: loss of the i-th of its k equal parts
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.torch_dispatch import TorchDispatchMode


class Unlike(Exception):
    """The draws for the parts are not slices of the draws for the whole batch."""


class Draws(TorchDispatchMode):
    """Dispatch mode that records the results of random operators, or replays recorded results for a part of a batch.

    Args:
        values: Recorded results for the whole batch to replay; ``None`` records.
        part: Index of the part.
        parts: Number of equal parts.

    Attributes:
        used: Number of results that were replayed.
    """

    def __init__(self, values: list[Tensor] | None = None, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        self.replays = values is not None
        self.values: list[Tensor] = values or []
        self.part = part
        self.parts = parts
        self.used = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _states(kwargs)
        out = func(*args, **kwargs)
        # Attention has the tag even without dropout, so the generators tell whether it has drawn.
        if all(torch.equal(a, b) for a, b in zip(before, _states(kwargs))):
            return out
        if "randperm" in str(func) and self.replays:
            raise Unlike("an order of rows is drawn for a whole batch")
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if self.replays:
                tensor.copy_(self._share(tensor))
            else:
                self.values.append(tensor.detach().clone())
        return out

    def _share(self, tensor: Tensor) -> Tensor:
        """Return the slice of the recorded values that belongs to a tensor of the part."""
        if self.used >= len(self.values):
            raise Unlike("a part draws more often than the whole batch")
        whole = self.values[self.used]
        self.used += 1
        if whole.shape == tensor.shape:
            return whole
        if whole.ndim and whole.shape[1:] == tensor.shape[1:] and len(whole) == self.parts * len(tensor):
            return whole.chunk(self.parts)[self.part]
        raise Unlike(f"a part draws {list(tensor.shape)} but the whole batch draws {list(whole.shape)}")


def _states(kwargs: Mapping[str, Any]) -> list[Tensor]:
    states = [torch.get_rng_state()]
    own = kwargs.get("generator")
    if own is not None:
        states.append(own.get_state())
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states

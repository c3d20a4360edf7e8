"""The same random numbers for a batch as a whole and for its parts: noise that belongs to a row goes with the row.

draws = Draws();               with draws: loss of the whole batch
part = Draws(draws.values, i, k);    with part: loss of the i-th of its k equal parts
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.torch_dispatch import TorchDispatchMode


class Unlike(Exception):
    """What is drawn for the parts is not what is drawn for the whole, cut up."""


class Draws(TorchDispatchMode):
    """Notes what random operators return; or gives back what another one has noted of the whole batch, for one of its
    parts.
    """

    def __init__(self, values: list[Tensor] | None = None, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        self.values: list[Tensor] = [] if values is None else values
        self.replays, self.part, self.parts, self.used = values is not None, part, parts, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _states(kwargs) if may_draw else []
        out = func(*args, **kwargs)
        # Attention has the tag without dropout, too.
        if may_draw and not all(map(torch.equal, before, _states(kwargs))):
            if "randperm" in str(func) and self.replays:
                raise Unlike("rows are drawn for a whole batch at once")
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if self.replays:
                    tensor.copy_(self._share(tensor))
                else:
                    self.values.append(tensor.detach().clone())
        return out

    def _share(self, tensor: Tensor) -> Tensor:
        if self.used >= len(self.values):
            raise Unlike("a part draws more often than the whole batch")
        whole, self.used = self.values[self.used], self.used + 1
        if whole.shape == tensor.shape:
            return whole
        if whole.ndim and whole.shape[1:] == tensor.shape[1:] and len(whole) == self.parts * len(tensor):
            return whole.chunk(self.parts)[self.part]
        raise Unlike(f"a part draws {list(tensor.shape)} where the whole batch draws {list(whole.shape)}")


def _states(kwargs: Mapping[str, Any]) -> list[Tensor]:
    own = kwargs.get("generator")
    states = [torch.get_rng_state(), *([own.get_state()] if own is not None else [])]
    return [*states, *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]

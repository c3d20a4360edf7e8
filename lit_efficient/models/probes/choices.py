"""Modes in which a network's random numbers and the sizes of its scores decide nothing.

    topk(x), sort(x), argmax(x), max(x), ...   choose as for   u[i] = sin(2.4 i) in the place of x[..., i]

Which tokens a network chooses depends on its weights. Among equal scores, of which a rectifier makes many, it also
depends on the length of the row. A check with the weights of one moment sees one choice. With choices by place, a
token chooses others as soon as its document lies elsewhere in a row, whatever the weights. Experts have the same place
for all tokens, so the choice of an expert does not change. Masked scores keep their values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.internals.torch_dispatch import TorchDispatchMode, compared_axis
from lit_efficient.internals.wraps import temporarily

_DROPOUT_P = 4  # position of the argument in scaled_dot_product_attention
_MASKED = 9e3  # magnitude from which a score is a mask: -1e4, minus infinity, or the lowest number of a type


class ChoicesByPlace(TorchDispatchMode):
    """Mode in which operators that compare numbers along an axis, and return indices of them, choose by place.

    The operators are found by their schema: floating-point numbers and an axis go in, and indices come out.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, object] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = args[0] if args else None
        if type(scores) is not Tensor or not scores.is_floating_point() or not scores.ndim:
            return result
        dim = compared_axis(func, args, kwargs or {})
        outputs = result if isinstance(result, tuple | list) else (result,)
        if dim is None or not all(type(out) is Tensor for out in outputs) or outputs[-1].dtype != torch.int64:
            return result
        shape = [1] * scores.ndim
        shape[dim] = scores.shape[dim]
        places = torch.arange(scores.shape[dim], device=scores.device).mul(2.4).sin().to(scores.dtype)
        by_place = torch.where(scores.abs() < _MASKED, places.view(shape), scores)
        chosen = func(by_place, *args[1:], **(kwargs or {}))
        if isinstance(chosen, Tensor):
            return chosen
        indices = chosen[1]
        if indices.ndim == scores.ndim:
            values = scores.gather(dim, indices)
        else:
            values = scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return values, indices


@contextmanager
def without_dropout() -> Iterator[None]:
    """Run the body with dropout that keeps everything, so that a network in training mode can be compared with itself.

    The functions are replaced: torch leaves a `TorchFunctionMode` during a backward pass, in which blocks with
    activation checkpointing run again.
    """
    attend: Any = F.scaled_dot_product_attention

    def attend_all(*args: object, **kwargs: object) -> object:
        if len(args) > _DROPOUT_P:
            return attend(*args[:_DROPOUT_P], 0.0, *args[_DROPOUT_P + 1 :], **kwargs)
        return attend(*args, **kwargs | {"dropout_p": 0.0})

    kept = {name: _keep for name in dir(F) if "dropout" in name and not name.startswith("_")}
    with temporarily(F, **kept, scaled_dot_product_attention=attend_all), temporarily(torch, dropout=_keep):
        yield


def _keep(input: Tensor, *_: object, **__: object) -> Tensor:
    return input

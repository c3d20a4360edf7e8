"""What a module carries from batch to batch in attributes that no checkpoint holds: hidden states, counters."""

from inspect import get_annotations
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_efficient.surgery import unmixed

# These see to it themselves.
_KNOWN = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "bitsandbytes", "lit_efficient"}
_SHORT = 8  # of lists: a state for each layer, say


def attributes_of(module: nn.Module) -> dict[str, object]:
    """Marks of the plain attributes of a module and its parts, by name: equal ones mean that nothing was changed.

    Those of modules that write states of their own into checkpoints, or whose base classes do, are left out.
    """
    usual = vars(LightningModule()).keys()
    marks: dict[str, object] = {}
    for name, part in module.named_modules():
        kind = unmixed(part)
        if _root(kind) in _KNOWN or any(_root(cls) == "lit_efficient" for cls in kind.__mro__):
            continue
        saves = [getattr(kind, name, None) for name in ("on_save_checkpoint", "get_extra_state")]
        if any(_root(method) not in _KNOWN for method in saves if method is not None):
            continue
        mixed = {key for cls in type(part).__mro__ if _root(cls) == "lit_efficient" for key in get_annotations(cls)}
        for key, value in vars(part).items():
            if key not in usual and key not in mixed and not key.startswith("_lit_efficient"):
                marks[f"{name}.{key}".lstrip(".")] = _mark(value)
    return marks


def differs(before: object, now: object) -> bool:
    """Whether an attribute was given another value; a list that has grown only records what was seen."""
    grown = isinstance(before, list) and isinstance(now, list) and len(before) != len(now)
    return before != now and not grown


class _Content:
    """Equal to that of a tensor with the same values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content):
            return False
        mine, its = self.tensor, other.tensor
        return (mine.dtype, mine.device) == (its.dtype, its.device) and torch.equal(mine, its)

    __hash__ = None  # type: ignore[assignment]  # equal ones would need equal hashes


def _root(item: Any) -> str:
    """The package that a class or function is of."""
    return str(item.__module__).partition(".")[0]


def _mark(value: object) -> object:
    """What tells a value from a later one."""
    if isinstance(value, Tensor):
        return None if value.is_meta or value.layout is not torch.strided else _Content(value)
    if isinstance(value, tuple) or (isinstance(value, list) and len(value) <= _SHORT):
        return [_mark(item) for item in value]
    return value if isinstance(value, int | float | str) or value is None else None

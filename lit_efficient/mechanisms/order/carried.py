"""Detection of state that a module carries from batch to batch in plain attributes, such as hidden states and counters.

No checkpoint holds such attributes, so a resumed run would continue with their initial values.
"""

from inspect import get_annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_efficient.internals.contents import contents, length
from lit_efficient.surgery import unmixed

# Modules of these packages save what they carry.
_TRUSTED_PACKAGES = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "bitsandbytes", "lit_efficient"}
_LONGEST_LIST = 8  # a longer list is taken for a record; a shorter one may be a state per layer


def attributes_of(module: nn.Module) -> dict[str, object]:
    """Return a snapshot of the plain attributes of a module and its submodules, by dotted name.

    Equal snapshots mean that no attribute has changed. Submodules are left out if they, or a base class of theirs,
    write states of their own into checkpoints.
    """
    usual = vars(LightningModule()).keys()
    snapshots: dict[str, object] = {}
    for name, part in module.named_modules():
        kind = unmixed(part)
        if _package_of(kind) in _TRUSTED_PACKAGES or any(_package_of(cls) == "lit_efficient" for cls in kind.__mro__):
            continue
        savers = [getattr(kind, hook, None) for hook in ("on_save_checkpoint", "get_extra_state")]
        if any(saver is not None and _package_of(saver) not in _TRUSTED_PACKAGES for saver in savers):
            continue
        added_by_techniques: set[str] = set()
        for cls in type(part).__mro__:
            if _package_of(cls) == "lit_efficient":
                added_by_techniques |= get_annotations(cls).keys()
        for key, value in vars(part).items():
            if key not in usual and key not in added_by_techniques and not key.startswith("_lit_efficient"):
                snapshots[f"{name}.{key}".lstrip(".")] = _snapshot(value)
    return snapshots


def differs(before: object, now: object) -> bool:
    """Return whether an attribute has changed. A list with another length is a record and does not count."""
    if isinstance(before, list) and isinstance(now, list) and len(before) != len(now):
        return False
    return before != now


class _TensorContent:
    """Copy of a tensor that compares equal to the copy of another tensor with the same values, dtype and device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorContent):
            return False
        if self.tensor.dtype != other.tensor.dtype or self.tensor.device != other.tensor.device:
            return False
        with torch.DisableTorchFunctionSubclass():
            return torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]  # equal contents would need equal hashes


def _package_of(item: object) -> str:
    """Return the top-level package in which a class or function is defined."""
    return str(item.__module__).partition(".")[0]


def _snapshot(value: object) -> object:
    """Return a comparable copy of a value, or None for a value of a kind that is not watched."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided:
            return None
        with torch.DisableTorchFunctionSubclass():  # a subclass may refuse to be copied or compared
            return _TensorContent(value)
    if isinstance(value, tuple) or (isinstance(value, list) and length(value) <= _LONGEST_LIST):
        return [_snapshot(item) for item in contents(value)]
    if isinstance(value, int | float | str):
        return value
    return None

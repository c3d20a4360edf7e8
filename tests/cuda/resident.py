"""Bytes on the device that is not there, counted after every operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Resident(TorchDispatchMode):
    """Count, within `fake_cuda`, the storages of its device: one that is emptied and filled again counts as it is now.

    Args:
        known: Tensors that exist already.
        empty: Storages that exist already, though they may be empty.
    """

    def __init__(self, known: Any = (), empty: Any = ()) -> None:
        super().__init__()
        self.peak = 0
        self.storages: dict[int, weakref.ref[Any]] = {}
        self._add(list(known))
        self.storages |= {storage._cdata: weakref.ref(storage) for storage in empty}

    def now(self) -> int:
        """Bytes on the device at this moment."""
        alive = [storage for ref in self.storages.values() if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in alive if getattr(storage, "on_fake_cuda", False))

    def start(self) -> int:
        """Begin a new peak; what is there now."""
        self.peak = self.now()
        return self.peak

    def _add(self, tree: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tree_leaves(tree):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = f(*args, **(kwargs or {}))
        self._add(result)
        self.peak = max(self.peak, self.now())
        return result

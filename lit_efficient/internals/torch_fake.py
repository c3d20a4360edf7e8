"""Fake tensors, which have no values, on any device. Checked with torch 2.13."""

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)

from lit_efficient.internals.torch_dispatch import no_dispatch_modes
from lit_efficient.internals.torch_trees import tree_map_only
from lit_efficient.internals.wraps import temporarily

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "forget_cached_fakes",
    "like_real_ones",
]


@contextmanager
def like_real_ones() -> Iterator[None]:
    """Context in which fake tensors can be used like real tensors.

    - ``module.to`` moves them. torch refuses to swap tensors with weak references, but keeps some itself
      (``torch._C._swap_tensor_impl``).
    - They can be copied, and read as the real tensor in their attribute ``known``, or without one as zeros.
    - ``torch.tensor`` takes lists of them.
    - They can be parameters of any class (``torch.Tensor._make_subclass``).
    - transformers builds the same masks as for real tensors (``import_utils.is_fake_tensor``).
    """
    swap = torch.utils.swap_tensors
    make = Tensor._make_subclass
    new_tensor = torch.tensor

    def swap_fakes(one: Tensor, other: Tensor) -> None:
        if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor)):
            swap(one, other)
            return
        one.__dict__.update(other.__dict__)  # attributes of a class of parameters
        torch._C._swap_tensor_impl(one, other)

    def copy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            alike = self.detach().clone()
            if isinstance(self, nn.Parameter):
                alike = nn.Parameter(alike, self.requires_grad)
            memo[id(self)] = alike
        return memo[id(self)]

    def read(self: Tensor, method: str) -> Any:
        # The method is called inside, too: with a mode, numpy() would return memory that nobody has written.
        with no_dispatch_modes():
            tensor = vars(self).get("known")
            if tensor is None:
                tensor = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
            return getattr(tensor.cpu(), method)()

    def subclass(kind: Any, data: Tensor, requires_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return make(kind, data, requires_grad, **options)
        alias = data.detach()
        alias.__class__ = _fake_kind(kind)
        return alias.requires_grad_(requires_grad)

    def tensor(data: object, **options: Any) -> Tensor:
        return new_tensor(tree_map_only(FakeTensor, lambda one: one.tolist(), data), **options)

    own = {
        "__deepcopy__": copy,
        "numpy": lambda self, **_: read(self, "numpy"),
        "tolist": lambda self: read(self, "tolist"),
    }
    hugging_face: Any = SimpleNamespace(is_fake_tensor=None)
    with suppress(ImportError):
        from transformers.utils import import_utils as hugging_face
    with (
        temporarily(FakeTensor, **own),
        temporarily(hugging_face, is_fake_tensor=lambda tensor: False),
        temporarily(torch, tensor=tensor),
        temporarily(torch.utils, swap_tensors=swap_fakes),
    ):
        Tensor._make_subclass = staticmethod(subclass)  # type: ignore
        try:
            yield
        finally:
            del Tensor._make_subclass  # the method of the base class shows through again


@functools.cache
def _fake_kind(kind: Any) -> Any:
    """Return a class that derives from a class of parameters, such as one for 4 bits, and from FakeTensor."""
    if issubclass(kind, FakeTensor):  # the class of a fake, which a library gives to a copy
        return kind

    def detach(self: Tensor) -> Any:
        alias = Tensor.detach(self)
        alias.__class__ = type(self)
        return alias

    return type(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__, "detach": detach})


def forget_cached_fakes() -> None:
    """Remove fake tensors from caches of all modules: dicts, and results of ``functools.cache``."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for kept in list(vars(module).values()):
            if type(kept) is dict:  # subclasses may import modules when they are read
                for key in [key for key, value in list(kept.items()) if isinstance(value, FakeTensor)]:
                    del kept[key]
            elif type(kept) is functools._lru_cache_wrapper and _has_fakes(gc.get_referents(kept)):
                kept.cache_clear()


def _has_fakes(tree: Any, depth: int = 4) -> bool:
    if type(tree) is dict:
        tree = [*tree.values()]
    if type(tree) in (list, tuple) and depth:
        return any(_has_fakes(one, depth - 1) for one in tree)
    return isinstance(tree, FakeTensor)

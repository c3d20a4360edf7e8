"""Random weights of a network that is larger than a host: recorded while it is built, drawn when each shard is filled.

    with DeferredDraws() as draws: network = make()      # large tensors on the meta device
    draws.note(network)  ->  shard  ->  draws.get_tensor(name), one tensor after the other
    (distributed/weight_slices.py)

While the network is built, each operation on a large tensor is recorded with the state of the generator before it. Its
random numbers are drawn and dropped, so that the generator advances as usual. Filling repeats the operations for one
tensor after the other and keeps the slice of this process. The weights are those of a network that was built as usual
on the CPU, bit for bit.

Costs: each tensor is drawn twice, by every process; memory for one tensor at a time
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import (
    TorchDispatchMode,
    changes_arguments,
    no_dispatch_modes,
    storage_id,
    truncated_draws,
)
from lit_efficient.internals.torch_tensors import version
from lit_efficient.internals.torch_trees import tree_leaves, tree_map

Operation: TypeAlias = Any  # an operation of ATen, or torch's function for truncated normals
Tree: TypeAlias = Any  # arguments or a result of an operation: tensors in nested containers

_ATEN = torch.ops.aten
_MAKE = {_ATEN.empty, _ATEN.empty_strided, _ATEN.zeros, _ATEN.ones, _ATEN.full, _ATEN.randn, _ATEN.rand}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SMALL = 1024  # elements; smaller tensors are built at once, because code may read their values


@dataclass(frozen=True)
class _Place:
    """Memory layout of a tensor on the meta device when it was recorded. Later code may change its shape or storage."""

    storage: torch.UntypedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @property
    def key(self) -> int:
        return storage_id(self.storage)

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Given:
    """Tensor with numbers that was an argument of an operation, and its version counter at that time."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Note:
    """Record of an operation: arguments, result, random state before it, and the default dtype."""

    func: Operation
    args: Tree
    kwargs: Tree
    result: Tree
    state: Tensor | None
    dtype: torch.dtype


class _Ordinary(TorchFunctionMode):
    """Mode in which ``is_meta`` is False for all tensors, because torch's initialisers skip meta tensors."""

    def __torch_function__(self, func: Operation, types: object, args: Tree = (), kwargs: Tree = None) -> Tree:
        if func == _IS_META:
            return False
        return func(*args, **(kwargs or {}))


class DeferredDraws(TorchDispatchMode):
    """Context that builds a network without memory for its large tensors; :meth:`get_tensor` computes each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[_Note] = []
        self._named: dict[str, _Place | Tensor] = {}  # the tensor itself if it has numbers
        self._modes = ExitStack()

    def __enter__(self) -> "DeferredDraws":
        self._modes.enter_context(truncated_draws(self._truncated))
        self._modes.enter_context(_Ordinary())
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._modes.close()

    def _truncated(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def truncated(tensor: Tensor, *args: Tree, **kwargs: Tree) -> Tensor:
            if not _is_meta(tensor):
                return draw(tensor, *args, **kwargs)
            state = _generator(kwargs).get_state()
            with no_dispatch_modes():
                draw(_scratch(tensor), *args, **kwargs)
            self._note(draw, _kept((tensor, *args)), kwargs, tensor, state)
            return tensor

        return truncated

    def __torch_dispatch__(self, func: Operation, types: object, args: Tree = (), kwargs: Tree = None) -> Tree:
        kwargs = dict(kwargs or {})
        makes = getattr(func, "overloadpacket", None) in _MAKE and not any(map(_is_meta, tree_leaves((args, kwargs))))
        if makes and kwargs.get("device") in (None, torch.device("cpu")) and _elements(func, args) >= _SMALL:
            kwargs["device"] = torch.device("meta")
        as_given = _kept((args, kwargs))  # recorded before the call, which may change them in place
        result = func(*args, **kwargs)
        if not any(map(_is_meta, tree_leaves((args, kwargs, result)))):
            return result
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _generator(kwargs).get_state()
            func(*tree_map(_scratch, args), **_on_cpu(tree_map(_scratch, kwargs)))
        self._note(func, as_given[0], as_given[1], result, state)
        return result

    def _note(self, func: Operation, args: Tree, kwargs: Tree, result: Tree, state: Tensor | None) -> None:
        self._notes.append(_Note(func, args, kwargs, _kept(result), state, torch.get_default_dtype()))

    def note(self, module: nn.Module) -> None:
        """Record the state of each parameter and buffer of a module, before it is sharded or moved."""
        named = _tensors(module)
        for name, tensor in named.items():
            self._named[name] = _place_of(tensor) if _is_meta(tensor) else tensor.detach().clone()

    def noted(self) -> list[str]:
        """Return the names of the recorded parameters and buffers."""
        return list(self._named)

    def __deepcopy__(self, memo: object) -> "DeferredDraws":
        """Return the object itself: records do not change."""
        return self  # what was noted does not change

    def get_tensor(self, name: str) -> Tensor:
        """Return the whole tensor for a recorded parameter or buffer.

        Raises:
            ConfigurationError: If an argument of its operations was changed in place later.
        """
        wanted = self._named[name]
        if not isinstance(wanted, _Place):
            return wanted
        needed = {wanted.key}
        chosen = []
        for note in reversed(self._notes):  # operations on this tensor's storage, and on their arguments'
            given = _places((note.args, note.kwargs))
            written = given if changes_arguments(note.func) else []  # an operation in place
            if any(place.key in needed for place in [*written, *_places(note.result)]):
                chosen.append(note)
                needed |= {place.key for place in given}
        real: dict[int, torch.UntypedStorage] = {}

        def realized(value: Tree) -> Tree:
            if isinstance(value, _Given):
                if version(value.tensor) != value.version:
                    raise ConfigurationError(
                        f"DeferredDraws: weights were computed from a tensor of {tuple(value.tensor.shape)} that was "
                        "changed in place afterwards: compute them from a copy"
                    )
                return value.tensor
            if isinstance(value, _Place):
                return value.of(real[value.key])
            return value

        for note in reversed(chosen):
            kwargs = _on_cpu(tree_map(realized, note.kwargs))
            if note.state is not None and "generator" in kwargs:
                kwargs["generator"] = torch.Generator()
            with _as_then(note, _generator(kwargs)):
                made = note.func(*tree_map(realized, note.args), **kwargs)
            for place, own in zip(tree_leaves(note.result), tree_leaves(made)):
                if isinstance(place, _Place):
                    real.setdefault(place.key, own.untyped_storage())
        return wanted.of(real[wanted.key])


@contextmanager
def _as_then(note: _Note, generator: torch.Generator) -> Iterator[None]:
    """Run the body with the generator and the default dtype of a record, and restore both."""
    state = generator.get_state()
    dtype = torch.get_default_dtype()
    if note.state is not None:
        generator.set_state(note.state)
    torch.set_default_dtype(note.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        generator.set_state(state)


def _place_of(tensor: Tensor) -> _Place:
    return _Place(tensor.untyped_storage(), tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _kept(tree: Tree) -> Tree:
    """Return arguments or results in their current state: layouts of meta tensors, copies of small tensors."""

    def kept(value: Tree) -> Tree:
        if not isinstance(value, Tensor):
            return value
        if _is_meta(value):
            return _place_of(value)
        if value.numel() < _SMALL:
            return value.detach().clone()
        return _Given(value, version(value))

    return tree_map(kept, tree)


def _places(tree: Tree) -> list[_Place]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, _Place)]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)  # all names, because ``to_empty`` unties weights
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _elements(func: Operation, args: Tree) -> int:
    """Return the number of elements of a tensor that a factory function creates from a shape, its first argument."""
    if not args or not isinstance(args[0], list | tuple):
        return 0
    return int(torch.Size(args[0]).numel())


def _scratch(value: Tree) -> Tree:
    """Return memory of the same shape for a meta tensor, and other values unchanged."""
    if not _is_meta(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def _on_cpu(kwargs: dict[str, Tree]) -> dict[str, Tree]:
    if "device" in kwargs:
        return {**kwargs, "device": torch.device("cpu")}
    return kwargs


def _generator(kwargs: Tree) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator

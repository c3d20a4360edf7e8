"""Put everything back: a record of every mutable thing that is reachable from some roots, restored in place.

    record = Rewind([module, optimizer, ...]);    ... train, fail, validate ...;    record.restore()

A checkpoint is not enough to undo steps that were only a test: it knows neither gradients, train and eval mode, metrics
and progress counters, nor attributes of a user's own. So this walks the objects themselves: values of tensors and
arrays, contents of dicts, lists and sets, attributes of objects, states of generators. Identity is kept: who holds
a tensor or a list holds the same one afterwards, with the old contents. The machinery of a run (its trainer, loggers,
loops' fetchers) is gone around, in either of Lightning's namespaces.
"""

import copy
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_efficient.internals.lightning_loops import DATA_FETCHER
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass

_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
# Of torch and of the standard library only these have attributes that a training step changes; threads, locks, files
# and process groups must be left alone.
_TORCH = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_STDLIB = {"collections", "types", "argparse"}
_OUTSIDE = (DataLoader, Dataset, Sampler)  # trials fetch by index: samplers and loaders are not touched
# By name, because Lightning's classes exist twice: in lightning.pytorch and in pytorch_lightning.
_MACHINERY = {"Trainer", "Strategy", "Accelerator", "Logger", "Profiler", "CombinedLoader", DATA_FETCHER}


class Rewind:
    """A record of the state of some objects, and of the global random generators.

    Args:
        roots: Objects to record with all that can be reached from them, but for datasets, loaders and samplers.
        shallow: Objects of which only the attributes are recorded, not what these hold.
        outside: Says of a type whether to stop at its instances, too.

    Example:
        >>> numbers = {"step": 1, "seen": [1]}
        >>> record = Rewind([numbers])
        >>> numbers["seen"].append(2)
        >>> record.restore()
        >>> numbers
        {'step': 1, 'seen': [1]}
    """

    def __init__(
        self,
        roots: Iterable[object],
        shallow: Iterable[object] = (),
        outside: Callable[[type], bool] = lambda kind: False,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        roots, shallow = list(roots), list(shallow)
        self._restless = _restless([*roots, *shallow])
        self._rest()
        for item in shallow:
            self._undo.append(_undo_mapping(vars(item)))
        for item in reachable(roots, outside):
            self._record(item)
        self._random = random_states()

    def restore(self) -> None:
        """Put everything back. May be called any number of times."""
        with torch.no_grad():
            self._rest()
            for undo in self._undo:
                undo()
        set_random_states(self._random)

    def _rest(self) -> None:
        for item in self._restless:
            item.come_to_rest()

    def _record(self, item: Any) -> None:
        undo = _undo_for(item)
        if undo is not None:
            self._undo.append(undo)
        if isinstance(item, Tensor):
            self.tensors.append(item)
        if _has_state(type(item)):
            if hasattr(item, "__dict__"):
                self._undo.append(_undo_mapping(vars(item)))
            if slots := _slots_of(item):
                self._undo.append(_undo_slots(item, slots))


def reachable(roots: Iterable[object], outside: Callable[[type], bool] = lambda kind: False) -> Iterator[Any]:
    """Every mutable thing that can be reached from some roots, each once; see :class:`Rewind` for where this stops."""
    stack = list(roots)
    seen: dict[int, object] = {}  # the objects too, so that no id is used twice
    while stack:
        item: Any = stack.pop()
        kind = type(item)
        if issubclass(kind, (*_LEAVES, *_OUTSIDE)) or id(item) in seen:
            continue
        if outside(kind) or _is_machinery(kind) or hasattr(kind, "come_to_rest"):
            continue
        seen[id(item)] = item
        yield item
        if isinstance(item, Tensor):
            stack.append(item.grad if item.is_leaf else None)
        elif issubclass(kind, dict):
            stack += [*item.keys(), *item.values()]
        elif issubclass(kind, list | tuple | set | frozenset | deque):
            stack += item
        if _has_state(kind):
            stack += vars(item).values() if hasattr(item, "__dict__") else ()
            stack += _slots_of(item).values()


def _restless(roots: list[object]) -> list[Any]:
    """What modules hold that moves their weights about: it takes them home first, and has no state of its own then."""
    parts = [part for root in roots if isinstance(root, nn.Module) for part in root.modules()]
    held = {id(value): value for part in parts for value in vars(part).values()}
    return [value for value in held.values() if hasattr(type(value), "come_to_rest")]


def _is_machinery(kind: type) -> bool:
    """Whether a type belongs to the machinery of a run."""
    roots = {"lightning", "pytorch_lightning"}
    return any(base.__name__ in _MACHINERY and base.__module__.partition(".")[0] in roots for base in kind.__mro__)


def _has_state(kind: type) -> bool:
    """Whether instances of a type have attributes that a step may change."""
    root = kind.__module__.partition(".")[0]
    if root == "torch":
        return issubclass(kind, (*_TORCH, nn.Parameter))
    return root not in sys.stdlib_module_names or root in _STDLIB or kind.__module__ == "__main__"


def _slots_of(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _slots(type(item)) if hasattr(item, name)}


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else (name for name in names if not name.startswith("__"))


def _undo_for(item: Any) -> Callable[[], None] | None:
    if isinstance(item, Tensor):
        return None if item.device.type == "meta" or is_lazy(item) else _undo_tensor(item)
    if isinstance(item, dict):
        return _undo_mapping(item)
    if isinstance(item, list):
        return _undo_list(item)
    if isinstance(item, set | deque):
        return _undo_collection(item)
    if isinstance(item, np.ndarray):
        array = item.copy()
        return lambda: np.copyto(item, array) if item.flags.writeable else None
    for kind, get, put in (
        (torch.Generator, "get_state", "set_state"),
        (random.Random, "getstate", "setstate"),
        (np.random.RandomState, "get_state", "set_state"),
    ):
        if isinstance(item, kind):
            state = getattr(item, get)()
            return lambda: getattr(item, put)(state)
    if isinstance(item, np.random.Generator):
        state = item.bit_generator.state
        return lambda: setattr(item.bit_generator, "state", state)
    return None


def _undo_tensor(tensor: Tensor) -> Callable[[], None]:
    alias = tensor.detach()
    # On the host: a second copy of weights and states on the device would change the very memory that is measured.
    copy = alias.clone() if tensor.device.type == "cpu" else alias.to("cpu", copy=True)
    # Neither a wrapper nor a sparse tensor has one piece of memory that another tensor could take the place of.
    wrapper = is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided
    leaf, gradient, trains = tensor.is_leaf, tensor.grad if tensor.is_leaf else None, tensor.requires_grad

    def undo() -> None:
        if not wrapper and (tensor.shape != alias.shape or tensor.data_ptr() != alias.data_ptr()):
            tensor.data = alias
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            alias.copy_(copy)
        if leaf:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)

    return undo


def _undo_mapping(mapping: dict[Any, Any]) -> Callable[[], None]:
    kept = dict(mapping)
    kind: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict  # each has an order of its own to keep

    def undo() -> None:
        if not _same(mapping.keys(), kept.keys()) or not _same(mapping.values(), kept.values()):
            kind.clear(mapping)
            kind.update(mapping, kept)

    return undo


def _undo_list(items: list[Any]) -> Callable[[], None]:
    kept = list(items)

    def undo() -> None:
        if not _same(items, kept):
            list.__setitem__(items, slice(None), kept)

    return undo


def _undo_collection(items: set[Any] | deque[Any]) -> Callable[[], None]:
    kept = list(items)

    def undo() -> None:
        items.clear()
        items.update(kept) if isinstance(items, set) else items.extend(kept)

    return undo


def _undo_slots(item: object, kept: dict[str, Any]) -> Callable[[], None]:
    def undo() -> None:
        for name, value in kept.items():
            if getattr(item, name, None) is not value:
                object.__setattr__(item, name, value)

    return undo


def _same(now: Iterable[object], then: Iterable[object]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    now, then = list(now), list(then)
    return len(now) == len(then) and all(a is b for a, b in zip(now, then))


def random_states() -> dict[str, Any]:
    """States of the global generators of torch (all devices in use), Python and NumPy."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    for name, backend in _backends().items():
        states[name] = backend.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for name, backend in _backends().items():
        if name in states:
            backend.set_rng_state_all(states[name])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def own_generators(*owners: Any, depth: int = 3) -> list[Any]:
    """Generators of torch, NumPy and Python that objects hold, in attributes and in what these hold."""
    found: dict[int, Any] = {}
    for owner in owners:
        if isinstance(owner, torch.Generator | np.random.Generator | random.Random):
            found[id(owner)] = owner
        elif depth and not isinstance(owner, torch.Tensor | np.ndarray | str | bytes | type):
            parts: Iterable[Any] = owner if isinstance(owner, list | tuple) and len(owner) <= 64 else ()
            parts = owner.values() if isinstance(owner, dict) and len(owner) <= 64 else parts
            inside = [*parts, *getattr(owner, "__dict__", {}).values()]
            found |= {id(one): one for one in own_generators(*inside, depth=depth - 1)}
    return list(found.values())


def generator_states(generators: Iterable[Any]) -> list[Any]:
    """The states of :func:`own_generators`, in order."""
    return [
        one.get_state().clone() if isinstance(one, torch.Generator)
        else one.getstate() if isinstance(one, random.Random)
        else copy.deepcopy(one.bit_generator.state)
        for one in generators
    ]  # fmt: skip


def set_generator_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Put back what :func:`generator_states` returned."""
    for one, state in zip(generators, states):
        if isinstance(one, torch.Generator):
            one.set_state(state)
        elif isinstance(one, random.Random):
            one.setstate(state)
        else:
            one.bit_generator.state = state


def same_random_states(one: Any, other: Any) -> bool:
    """Whether two of what :func:`random_states` returns, or parts of them, are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_random_states(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_random_states, one, other))
    return bool(one == other)


@contextmanager
def other_randomness(states: dict[str, Any]) -> Iterator[None]:
    """Draw from ``states`` inside, and go on outside as if nothing had been drawn."""
    before = random_states()
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


def _backends() -> dict[str, types.ModuleType]:
    return {name: backend for name, backend in (("cuda", torch.cuda), ("xpu", torch.xpu)) if backend.is_initialized()}
